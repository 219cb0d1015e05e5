"""Print the results even if a check hangs or ends the process. MPI may do both when it starts.

The process that prints has a child. Before each check it sends the results so far to the child. If the process ends
without a last message, or spends too long in one check, the child prints the results instead. Other processes only end
themselves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

from .findings import Diagnosis, Finding, wrong

Message = tuple[Finding, "Diagnosis | None"]
_LAUNCHERS = ("PMI", "PMIX", "OMPI", "HYDI", "PRTE", "MPI")  # their descriptors and variables are not the child's


class Watch:
    """Watches this process until :meth:`over`. Not collective.

    Args:
        prints: whether this process prints the results. Then it has a child.
        as_json: whether it prints JSON.
        patience_s: how long a check may take.
    """

    def __init__(self, prints: bool, as_json: bool, patience_s: float):
        self._patience_s = patience_s
        self._child: subprocess.Popen[bytes] | None = None
        self._to_child: Connection | None = None
        if prints:
            heard, self._to_child = multiprocessing.Pipe(duplex=False)
            numbers = (heard.fileno(), os.getpid(), patience_s, int(as_json))
            env = {name: value for name, value in os.environ.items() if name.split("_")[0] not in _LAUNCHERS}
            # The child has its own session, so that it survives when somebody kills the process group of its rank.
            self._child = subprocess.Popen([sys.executable, "-m", __name__, *map(str, numbers)], env=env,
                                           pass_fds=[heard.fileno()], start_new_session=True)  # fmt: skip
            heard.close()

    def doing(self, pending: Finding, known: Diagnosis | None) -> None:
        """Announce the next check.

        Args:
            pending: the result of this check if it does not end well, without its text.
            known: the results so far. None: they were already printed.
        """
        if self._to_child is None:
            faulthandler.dump_traceback_later(self._patience_s, exit=True)
        else:
            self._tell((pending, known))

    def over(self) -> None:
        """End the watch. May be called twice."""
        if self._child is None or self._to_child is None:
            faulthandler.cancel_dump_traceback_later()
            return
        self._tell(None)
        self._to_child.close()
        try:
            self._child.wait(self._patience_s)
        except subprocess.TimeoutExpired:  # the child is no longer needed
            self._child.kill()
        self._child = self._to_child = None

    def _tell(self, message: Message | None) -> None:
        assert self._to_child is not None
        with contextlib.suppress(OSError):  # a child that is gone prints nothing, but the checks continue
            self._to_child.send(message)


def stand_by(heard: Connection, pid: int, patience_s: float, show: Callable[[Diagnosis], None]) -> None:
    """Listen to the watched process until its last message. If that does not come, print in its place.

    Args:
        heard: connection from the process.
        pid: the process. It is killed if a check takes too long.
        patience_s: how long a check may take.
        show: prints the results.
    """
    pending = wrong("start", "", "")
    known: Diagnosis | None = None
    how = f"this check did not end within {patience_s:g} s, so its process was killed"
    while heard.poll(patience_s):
        try:
            message: Message | None = heard.recv()
        except (EOFError, OSError):
            how = "this check ended the process: look at its stderr for the reason"
            break
        if message is None:
            return
        pending, known = message
    else:
        if os.getppid() == pid:
            os.kill(pid, signal.SIGKILL)
    last = dataclasses.replace(pending, text=how)
    if known is not None:
        show(dataclasses.replace(known, lines=(*known.lines, last)))
    else:
        print(f"Error: {last.subject}, {last.check}: {how}", file=sys.stderr)


def main(heard: str, pid: str, patience_s: str, as_json: str) -> None:
    """Run as the child."""
    from .view import show

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends with the process it watches over, a moment later
    connection = Connection(int(heard), writable=False)
    stand_by(connection, int(pid), float(patience_s), lambda found: show(found, as_json == "1"))


if __name__ == "__main__":
    main(*sys.argv[1:])
