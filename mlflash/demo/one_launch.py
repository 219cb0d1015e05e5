"""One launch of the rank program: followed, shot at, and always brought to its end."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ..config import DISABLE
from ..launcher.processes import end_session, mpiexec, spawn
from .rank_log import RankLog

_POLL_S = 0.02
_DEATH_TIMEOUT_S = 30.0  # for mpiexec to notice that ranks were killed
_TERM_TIMEOUT_S = 5.0


class DemoFailed(Exception):
    """A launch did not do what the demo needs; the text has the end of its log."""


@dataclasses.dataclass(frozen=True)
class Launched:
    """What starts ranks: a command, and its further environment. Each rank has the folder of the launch as argument."""

    command: Sequence[str]
    env: Mapping[str, str]


def by_mpiexec(folder: Path, ranks: int, arguments: Iterable[str], env: Mapping[str, str]) -> Launched:
    """Have mpiexec start ranks of `train`.

    Args:
        folder: of the launch.
        ranks: how many.
        arguments: of the rank program, without ``--folder``.
        env: further environment.

    Raises:
        MpiUnavailable: there is no mpiexec.
    """
    program = [sys.executable, "-m", "mpi4py", "-m", "mlflash.demo.train", *arguments, "--folder", str(folder)]
    # What a killed mpiexec leaves behind in TMPDIR goes with the folder.
    return Launched(*mpiexec(ranks, program, {**env, "TMPDIR": str(folder), DISABLE: ""}))


class Training:
    """A running launch with its ranks; leave the context manager, and none of them is left.

    Args:
        folder: an empty directory of this launch alone; its path tells our processes from others.
        ranks: how many.
        launched: how they are started.
        timeout_s: the launch is ended after this, seconds.
        stays: whether it goes on, and ends well, where ranks of it are killed.
    """

    def __init__(self, folder: Path, ranks: int, launched: Launched, timeout_s: float, stays: bool = False):
        self._folder, self._timeout_s, self._stays = folder, timeout_s, stays
        self._journals = [RankLog(folder, rank) for rank in range(ranks)]
        self._pids: dict[int, int] = {}
        self._done: set[int] = set()
        self._killed = False
        self._deadline = time.monotonic() + timeout_s
        # To a file: a pipe would have to be emptied. A session of its own: one signal reaches all of it.
        with (folder / "log").open("w") as log:
            self._launcher = spawn(launched.command, env={**os.environ, **launched.env}, stdout=log, stderr=log)

    def events(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield ``(rank, line of its log)`` as they come, until the launcher has ended and all is read.

        Raises:
            DemoFailed: time is up, the launcher failed or a rank did not come to its end; after a kill only where the
                others stay.
        """
        running = True
        while running:
            running = self._launcher.poll() is None
            for rank, rank_log in enumerate(self._journals):
                for line in rank_log.news():
                    if line["event"] == "start":
                        self._pids[rank] = line["pid"]
                    elif line["event"] == "done":
                        self._done.add(rank)
                    yield rank, line
            if running and time.monotonic() > self._deadline:
                if self._killed:
                    return  # the launcher did not notice the death; leaving the context ends it
                raise DemoFailed(f"not ended after {self._timeout_s:g} s; {self.log_tail()}")
            if running:
                time.sleep(_POLL_S)
        # Open MPI has ended with 0 after a crash, so that the ranks' own word counts as well.
        if not self._killed and (self._launcher.returncode != 0 or len(self._done) < len(self._journals)):
            raise DemoFailed(
                f"the launcher ended with {self._launcher.returncode}, and {len(self._done)} of {len(self._journals)} "
                f"ranks came to their end; {self.log_tail()}"
            )

    def kill(self, ranks: Sequence[int]) -> None:
        """Send SIGKILL to these ranks, as a node that crashes does; what does not stay has half a minute to notice.

        Raises:
            DemoFailed: one of them is not there any more.
        """
        if gone := [rank for rank in ranks if not self._is_ours(self._pids[rank])]:
            raise DemoFailed(f"ranks {gone} had ended before they could be killed; {self.log_tail()}")
        self._killed = not self._stays
        for rank in ranks:
            self._kill_ours(self._pids[rank])
        if self._killed:
            self._deadline = min(self._deadline, time.monotonic() + _DEATH_TIMEOUT_S)

    def _kill_ours(self, pid: int) -> bool:
        if not self._is_ours(pid):
            return False
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def _is_ours(self, pid: int) -> bool:
        """Whether a pid is still a rank of this launch, and not another process that got its number."""
        try:
            return str(self._folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            return False

    def log_tail(self, lines: int = 15) -> str:
        """Give the end of what the ranks and the launcher printed. Not collective."""
        text = (self._folder / "log").read_text(errors="replace").splitlines()
        return f"the end of {self._folder / 'log'}:\n" + "\n".join(f"    {line}" for line in text[-lines:])

    def stop(self) -> None:
        """End what still runs: the launcher, and the ranks that wrote down their pid. May be called twice."""
        end_session(self._launcher, _TERM_TIMEOUT_S)  # SIGTERM first so that mpiexec can clean up after itself
        end = time.monotonic() + _TERM_TIMEOUT_S
        while (left := [pid for pid in self._pids.values() if self._kill_ours(pid)]) and time.monotonic() < end:
            time.sleep(_POLL_S)
        if left:
            raise DemoFailed(f"pids {left} survived SIGKILL for {_TERM_TIMEOUT_S:g} s")

    def __enter__(self) -> Training:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
