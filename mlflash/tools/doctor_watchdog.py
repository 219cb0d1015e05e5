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
from multiprocessing.connection import Connection

from ..launch.own_process import running
from .doctor_findings import Diagnosis, Finding, wrong

_MODULE = "mlflash.tools.doctor_watchdog"
_GRACE_S = 15.0  # longer than a check may take


class Watch:
    """Watches this process, in which a check may take ``timeout_s`` seconds, until :meth:`over`."""

    def __init__(self, prints: bool, as_json: bool, timeout_s: float):
        self._patience_s = timeout_s + (_GRACE_S if prints else 2 * _GRACE_S)
        self._child: subprocess.Popen[bytes] | None = None
        if prints:
            receiver, self._sender = multiprocessing.Pipe(duplex=False)
            arguments = map(str, (receiver.fileno(), os.getpid(), self._patience_s, int(as_json)))
            # The child has its own session, so that it survives when somebody kills the process group of its rank.
            self._child = subprocess.Popen([*running(_MODULE), *arguments], pass_fds=[receiver.fileno()],
                                           start_new_session=True)  # fmt: skip
            receiver.close()

    def begin(self, pending: Finding, known: Diagnosis | None) -> None:
        """Announce a check by the result that it has if it does not end, and the results so far, if not printed yet."""
        if self._child is None:
            faulthandler.dump_traceback_later(self._patience_s, exit=True)
        else:
            self._send((pending, known))

    def over(self) -> None:
        """End the watch. May be called twice."""
        faulthandler.cancel_dump_traceback_later()
        if self._child is None:
            return
        self._send(None)
        self._sender.close()
        try:
            self._child.wait(self._patience_s)
        except subprocess.TimeoutExpired:
            self._child.kill()
        self._child = None

    def _send(self, message: tuple[Finding, Diagnosis | None] | None) -> None:
        with contextlib.suppress(OSError):  # a child that is gone prints nothing, but the checks continue
            self._sender.send(message)


def stand_by(receiver: Connection, watched: int, patience_s: float, as_json: bool) -> None:
    """Listen to the watched process until its last message. If that does not come, print in its place."""
    pending, known = wrong("start", "", ""), None
    while receiver.poll(patience_s):
        try:
            message = receiver.recv()
        except (EOFError, OSError):
            how = "this check ended the process: look at its stderr for the reason"
            break
        if message is None:
            return
        pending, known = message
    else:
        how = f"this check did not end within {patience_s:g} s, so its process was killed"
        if os.getppid() == watched:
            os.kill(watched, signal.SIGKILL)
    if known is None:
        print(f"Error: {pending.subject}, {pending.check}: {how}", file=sys.stderr)
    else:
        last = dataclasses.replace(pending, text=how)
        dataclasses.replace(known, lines=(*known.lines, last)).print(as_json)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends with the process it watches over, a moment later
    number, pid, patience, json = sys.argv[1:]
    stand_by(Connection(int(number), writable=False), int(pid), float(patience), json == "1")
