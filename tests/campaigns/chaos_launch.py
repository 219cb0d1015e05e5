"""One launch under chaos.py: what its ranks have noted, its processes, and waits that end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Cluster, Launch
from processes import is_agent, parent_of, state
from waiting import take, until

from mlflash.memory.process_names import trainer_of

DAMAGED = ("cannot be restored from", "rebuilt from parity", "parity cannot be used", "is damaged and will be made")
FAILED = "the courier failed"
WRONG = (FAILED, "has no full redundancy", *DAMAGED)
_END_S = 60.0  # how long mpiexec may take to end what is left of a job


class Failure(Exception):
    """Something that must not happen did."""


class Attacked:
    """A launch, from its start to the end of its last process."""

    def __init__(self, cluster: Cluster, ranks: int, arguments: str):
        self.number = cluster.launches + 1
        self.ranks = ranks
        self.started = time.monotonic()
        self.launch: Launch = cluster.start(ranks, "campaigns/chaos_worker.py", arguments)
        self.out = self.launch.out
        self._mark = f"OUT={self.out}".encode()
        self.killed_at = 0.0  # unix time

    # What the ranks say

    def of(self, event: str) -> list[dict[str, Any]]:
        found = [record for record in self.launch.records() if record["event"] == event]
        return sorted(found, key=lambda record: record["rank"])

    def reached(self) -> int:
        """The last step that any rank has made; 0 where there was none."""
        texts = [path.read_text().strip() for path in self.out.glob("progress*")]
        return max((int(text) for text in texts if text), default=0)

    def until_save(self, rank: int, every: int) -> None:
        """Wait until a rank is at a step that it saves."""
        path = self.out / f"progress{rank}"
        self.until("a step that is saved", lambda: int(path.read_text() or 1) % every == 0, _END_S)

    def committed(self) -> int | None:
        return max((record["step"] for record in self.of("committed")), default=None)

    def whole(self) -> int | None:
        """The newest step that was in place on all nodes: committed, or restored and reprotected on all ranks."""
        if (step := self.committed()) is not None:
            return step
        reprotected = len(self.of("reprotected")) == self.ranks
        return self.of("restored")[0]["step"] if reprotected else None

    def log(self) -> str:
        return (self.out / "log").read_text()

    # Processes

    def processes(self) -> dict[int, int]:
        """All live processes of this launch and the rank that each is; -1 for those of MPI itself.

        They are found by their environment, so also before they have noted anything; but not in the instant in
        which a process is replaced by another program.
        """
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "environ").read_bytes().split(b"\0")
                doing = state(path / "stat")
            except OSError:  # it ended meanwhile
                continue
            if self._mark in words and doing not in "ZX":
                names = dict(word.split(b"=", 1) for word in words if b"=" in word)
                told = (names[name] for name in (b"CHAOS_RANK", b"PMI_RANK") if name in names)
                found[int(path.name)] = int(next(told, b"-1"))
        return found

    def parts(self, rank: int) -> dict[str, int]:
        """The processes of a rank: its trainer, its agent, and its courier where there is one."""
        found = {}
        for pid, its in self.processes().items():
            if its == rank and not is_agent(pid):
                is_courier = trainer_of(Path(f"/proc/{pid}")) is not None
                found["courier" if is_courier else "trainer"] = pid
                if is_courier:
                    found["agent"] = parent_of(pid)
        return found

    def kill_part(self, rank: int, part: str) -> None:
        """Kill one process of a rank, and wait until it is dead."""
        pid = self.parts(rank).get(part)
        if pid is None:  # it is not up yet, or ends by itself
            return
        if part == "trainer":
            self.killed_at = self.killed_at or time.time()
        with contextlib.suppress(ProcessLookupError):  # that end has come
            os.kill(pid, signal.SIGKILL)
        until(lambda: pid not in self.processes(), f"the end of a {part}")

    def end_trainers(self) -> None:
        for rank in range(self.ranks):
            self.kill_part(rank, "trainer")

    def alive(self) -> bool:
        return self.launch.running() or bool(self.processes())

    def signal(self, ranks: set[int], number: int) -> None:
        if number == signal.SIGKILL:
            self.killed_at = self.killed_at or time.time()
        for pid in [pid for pid, rank in self.processes().items() if rank in ranks]:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def die(self, ranks: set[int]) -> set[int]:
        """Kill ranks and wait until they are dead; returns the ranks killed.

        Where one of them has not started yet, mpiexec and all else is killed: it must not start afterwards.
        """
        if not ranks <= set(self.processes().values()):
            ranks = {-1, *range(self.ranks)}
            self.killed_at = self.killed_at or time.time()
            self.launch.kill()
            take(0.1)  # a process that was just being started shows up

        def are_dead() -> bool:
            self.signal(ranks, signal.SIGKILL)
            return not ranks & set(self.processes().values())

        try:
            until(are_dead, "killed ranks do not die", _END_S)
        except AssertionError as problem:
            raise self.failure(str(problem)) from None
        return ranks - {-1}

    def end(self) -> None:
        """Wait until mpiexec has ended the rest of the job; kill what it leaves."""
        self.killed_at = self.killed_at or time.time()
        try:
            until(lambda: not self.alive(), "the end of all processes", _END_S)
        except AssertionError:
            left = self.processes()
            print(f"           launch {self.number}: mpiexec left {len(left)} processes, killed", flush=True)
            self.signal(set(left.values()), signal.SIGKILL)
            until(lambda: not self.alive(), "the end of what was killed")
        self.launch.kill()  # and what MPI left in /dev/shm

    # Waits

    def until(self, what: str, done: Callable[[], bool], timeout_s: float) -> None:
        """Wait until something is so; that the job ends before it is a failure, too."""

        def came() -> str:
            if done():  # asked once: it may be over a moment later
                return "it"
            return "" if self.alive() else "the end"

        try:
            first = until(came, what, timeout_s)
        except AssertionError as problem:
            raise self.failure(str(problem)) from None
        if first == "the end" and not done():
            raise self.failure(f"the job ended by itself before: {what}")

    def pause(self, seconds: float) -> None:
        """Let the job run for so long; it must not end meanwhile, nor complain."""
        take(seconds)
        if not self.alive():
            raise self.failure("the job ended by itself")

    def failure(self, what: str) -> Failure:
        """Say what went wrong, with notes, and the log, which has the ranks' stacks; the job is killed."""
        left = self.processes()
        self.signal({rank for rank in left.values() if rank >= 0}, signal.SIGUSR1)
        take(1)  # to write them
        notes = "\n".join(str(r) for r in sorted(self.launch.records(), key=lambda r: r["at"])[-40:])
        text = f"launch {self.number}: {what}\n--- notes\n{notes}\n--- log\n{self.log()[-20000:]}"
        self.signal(set(left.values()), signal.SIGKILL)
        self.launch.kill()
        return Failure(text)
