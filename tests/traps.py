"""Traps at the named points of mlflash: where a rank steps into one, it dies, or waits, or its node goes."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from processes import runs, started_by
from waiting import hang, take, until

from mlflash import crash_points

OUT = Path(os.environ["OUT"])


def kill_my_node(wipe: bool) -> None:
    """Die with all ranks of this emulated node and what they have started, and with its memory."""
    per_node = int(os.environ["MLFLASH_RANKS_PER_NODE"])
    starts = [json.loads(file.read_text().splitlines()[0]) for file in OUT.glob("rank*.jsonl")]
    node = next(record["rank"] for record in starts if record["pid"] == os.getpid()) // per_node
    root = Path(os.environ["MLFLASH_MEMORY"], f"mlflash-{os.getuid()}", os.environ["MLFLASH_JOB"])
    siblings = [r["pid"] for r in starts if r["rank"] // per_node == node and r["pid"] != os.getpid()]
    if wipe:
        # Stopped, they make no new file in what is deleted here, and their launcher does not yet kill this process.
        for pid in siblings:
            _send(signal.SIGSTOP, pid)
        until(lambda: not any(runs(pid) for pid in siblings), "all ranks of this node are stopped")
        shutil.rmtree(root / f"node{node}")
    for pid in [*siblings, *started_by({os.getpid(), *siblings})]:
        _send(signal.SIGKILL, pid)
    os.kill(os.getpid(), signal.SIGKILL)


def fill_memory() -> None:
    """Use up the file system of this cluster's memory."""
    with Path(os.environ["MLFLASH_MEMORY"], "filler").open("wb") as file:
        at, size = 0, 1 << 30
        while size >= 4096:
            try:
                os.posix_fallocate(file.fileno(), at, size)
                at += size
            except OSError:
                size //= 2


def fail() -> None:
    """Raise what MPI raises in the courier when a peer has died."""
    raise RuntimeError("a trap in the courier")


def vanish() -> None:
    """Let the directory that is drained to disappear; it comes back where somebody renames it."""
    directory = os.environ["FAULTY_ROOT"]
    os.rename(directory, directory + ".away")


ACTIONS: dict[str, Callable[[], None]] = {
    "rank": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "node": lambda: kill_my_node(wipe=False),
    "wipe": lambda: kill_my_node(wipe=True),
    "wait": hang,
    "pause": lambda: take(0.5),
    "hold": lambda: until((OUT / "go on").exists, "the test to say go on"),
    "fill": fill_memory,
    "fail": fail,
    "vanish": vanish,
}


class Trap:
    """Something that happens when a rank has passed some points in order.

    Args:
        path: names of points; what happens does so at the last of them.
        action: one of `ACTIONS`.
        rank: who steps into it; -1: whoever comes first, and only one.
    """

    def __init__(self, path: list[str], action: str, rank: int = -1):
        unknown = set(path) - set(crash_points.POINTS)
        assert not unknown, unknown
        self._left, self._action, self.rank = list(path), action, rank

    def reached(self, point: str) -> None:
        """Go on by a point."""
        if self._left and point == self._left[0]:
            self._left.pop(0)
            if not self._left and self._is_first():
                ACTIONS[self._action]()

    def _is_first(self) -> bool:
        try:
            (OUT / f"sprung{self.rank}").touch(exist_ok=self.rank >= 0)
        except FileExistsError:
            return False
        return True


def set_traps(specs: list[dict[str, object]], rank: int) -> None:
    """Arm the traps that this rank may step into."""
    traps = [trap for trap in (Trap(**spec) for spec in specs) if trap.rank in (-1, rank)]

    def reached(point: str) -> None:
        for trap in traps:
            trap.reached(point)

    if traps:
        crash_points.arm(reached)


def _send(number: int, pid: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
