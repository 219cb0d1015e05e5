"""One launch of the rank program: follow it, kill ranks of it, and always end it."""

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
    """A launch did not do what the demo needs. The message has the end of its log."""


@dataclasses.dataclass(frozen=True)
class Launched:
    """The command that starts ranks, and its additional environment. Each rank gets the folder of the launch."""

    command: Sequence[str]
    env: Mapping[str, str]


def by_mpiexec(folder: Path, ranks: int, arguments: Iterable[str], env: Mapping[str, str]) -> Launched:
    """Make the command of mpiexec that starts ranks of `train`.

    Args:
        folder: folder of the launch.
        ranks: number of ranks.
        arguments: arguments of the rank program, without ``--folder``.
        env: additional environment.

    Raises:
        MpiUnavailable: there is no mpiexec.
    """
    program = [sys.executable, "-m", "mpi4py", "-m", "mlflash.demo.train", *arguments, "--folder", str(folder)]
    # A killed mpiexec may leave files in TMPDIR. They are deleted with the folder.
    return Launched(*mpiexec(ranks, program, {**env, "TMPDIR": str(folder), DISABLE: ""}))


class Training:
    """A running launch with its ranks. The end of the context manager ends all of them.

    Args:
        folder: an empty directory that only this launch uses. Its path identifies our processes.
        ranks: number of ranks.
        launched: how they are started.
        timeout_s: the launch is ended after this time, in seconds.
        stays: whether the launch continues and ends well after ranks of it are killed.
    """

    def __init__(self, folder: Path, ranks: int, launched: Launched, timeout_s: float, stays: bool = False):
        self._folder, self._timeout_s, self._stays = folder, timeout_s, stays
        self._journals = [RankLog(folder, rank) for rank in range(ranks)]
        self._pids: dict[int, int] = {}
        self._done: set[int] = set()
        self._killed = False
        self._deadline = time.monotonic() + timeout_s
        # The output goes to a file, because a pipe must be read. One signal reaches all processes of its session.
        with (folder / "log").open("w") as log:
            self._launcher = spawn(launched.command, env={**os.environ, **launched.env}, stdout=log, stderr=log)

    def events(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield ``(rank, line of its log)`` as they come, until the launcher has ended and all lines are read.

        Raises:
            DemoFailed: time is up, the launcher failed, or a rank did not finish. After a kill, this is raised only if
                the others should stay.
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
                    return  # the launcher did not notice the death; the end of the context ends it
                raise DemoFailed(f"the launch did not end within {self._timeout_s:g} s; {self.log_tail()}")
            if running:
                time.sleep(_POLL_S)
        # Open MPI has exited with 0 after a crash, so each rank must also have logged its end.
        if not self._killed and (self._launcher.returncode != 0 or len(self._done) < len(self._journals)):
            raise DemoFailed(
                f"the launcher exited with {self._launcher.returncode}, and {len(self._done)} of {len(self._journals)} "
                f"ranks finished; {self.log_tail()}"
            )

    def kill(self, ranks: Sequence[int]) -> None:
        """Send SIGKILL to these ranks, like a crash of their node. A launch that should end then has half a minute.

        Raises:
            DemoFailed: one of the ranks has already ended.
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
        """Say whether a pid is still a rank of this launch, and not another process with the same number."""
        try:
            return str(self._folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            return False

    def log_tail(self, lines: int = 15) -> str:
        """Return the end of the output of the ranks and the launcher. Not collective."""
        text = (self._folder / "log").read_text(errors="replace").splitlines()
        return f"the end of {self._folder / 'log'}:\n" + "\n".join(f"    {line}" for line in text[-lines:])

    def stop(self) -> None:
        """End the launcher and the ranks that logged their pid, if they still run. May be called twice."""
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
