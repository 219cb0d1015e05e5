"""A training is killed at each named point, one kill a launch: each launch restores exactly what the last kill left.

A chain: launch k restores, and compares step and bits with what has to be there after the kill of launch k - 1; then it
goes on to its own point, and is killed there. Real processes, of which those that no kill hits outlive their launch and
may meet the next one. Where a kill leaves something else, memory and directory are cleared, and the chain goes on.

`saves`, `restores`, `repairs`, `drains` and `closes` say what each launch does, who dies at which point, and which step
has to come back. Other deaths at these points are in test_deaths.py; tests/simulation has all schemes and transports.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from forked_trainers import Trainers
from harness import UID, read_records, remove_segments, segments
from on_node import settings_of
from processes import free_port, runs, send, with_variable
from waiting import until

from mlflash.crash_points import POINTS

pytestmark = pytest.mark.gate

SCRIPT = Path(__file__).parents[1] / "support" / "killed_trainer.py"
IMPORTED = ["numpy", "mlflash.checkpointer.checkpointer", "mlflash.channel.connection"]
SMALL = {"MLFLASH_TEST_BLOCK_NBYTES": "16384"}  # so that there is a middle of a transfer
TRANSPORTS = ("p2p", "rma")  # by turns

RANKS = {"copy": 2, "rs:2+1": 3}  # each on a node of its own
Verbs = tuple[tuple[Any, ...], ...]
SAVE: Verbs = (("save",),)
SAVE_TWO = ("save_two",)
# Which step comes back: that before the last save, that of it, what the launch has restored, the newest drained.
OLD, NEW, SAME, DRAINED = "old", "new", "same", "drained"
NOTHING = (0, 0)  # step, and the launch that has saved it


@dataclasses.dataclass(frozen=True)
class Kill:
    """What a launch does, and how it ends.

    Attributes:
        point: where it is killed.
        dies: what dies there, of a rank: "rank": its processes, "wipe": its node, with its memory,
            "trainer": that process alone.
        back: which step comes back: SAME, OLD, NEW or DRAINED.
        rank: which one it is.
        before: points that are passed before.
        verbs: what the training does, see `killed_trainer.py`.
        lost: whether afterwards the memory of all nodes is lost, too.
        ranks: how many there are; 0: as many as ever.
        waits: whether it stays there for a while, in which others go on as far as they can.
    """

    point: str
    dies: str
    back: str
    rank: int = 1
    before: tuple[str, ...] = ()
    verbs: Verbs = ()
    lost: bool = False
    ranks: int = 0
    waits: bool = False


def saves(scheme: str) -> list[Kill]:
    """Kills in a second save, while the third is handed over. The first covers whatever the kill before has cost."""
    twice, grown = (*SAVE, SAVE_TWO), (*SAVE, ("grow",), SAVE_TWO)

    def kill(point: str, back: str, dies: str = "wipe", verbs: Verbs = twice) -> Kill:
        waits = point in ("protect.announced", "transfer.sent", "parity.sent")
        return Kill(point, dies, back, before=("commit.released",), verbs=verbs, waits=waits)

    early = ["stage.begun", "stage.unsealed", "stage.copied", "protect.announced", "share.agreed", "share.sealed"]
    late = ["protect.sealed", "commit.agreed", "commit.half_recorded", "commit.recorded"]
    kills = [kill(point, OLD) for point in early]
    kills += [kill(point, OLD, verbs=grown) for point in ("room.begun", "room.created")]
    if scheme == "copy":
        # The copy of the slot of rank 1, which is large, is not whole before rank 1 has much more than these.
        kills += [kill(f"transfer.{point}", OLD) for point in ("sent", "arrived", "received", "sealed")]
    else:
        # No rank has the heads of all slots before all have coded their part; who has them has sealed its own slot.
        kills += [kill(f"parity.{point}", OLD) for point in ("sent", "gathered", "coded")]
        kills += [kill(f"parity.{point}", NEW, "rank") for point in ("received", "sealed")]
    kills += [kill(point, NEW) for point in late]
    return [*kills, *(Kill(p, "wipe", NEW, before=(p,), verbs=twice) for p in ("commit.released", "commit.seen"))]


def restores(scheme: str) -> list[Kill]:
    """Kills in a restore and its reprotection, after a node was lost: what is killed before has its memory."""
    early = ["listed", "verified", "adopted", "fetched" if scheme == "copy" else "rebuilt", "gathered", "loading",
             "loaded"]  # fmt: skip
    kills = [Kill(f"restore.{point}", "rank", SAME, rank=number % 2) for number, point in enumerate(early)]
    kills += [Kill("parity.arrived", "rank", SAME)] if scheme != "copy" else []
    kills += [Kill("reprotect.begun", "rank", SAME)]
    kills += [Kill(f"reprotect.{point}", "wipe", SAME, rank=0) for point in ("copied", "freed", "done")]
    return [*kills, Kill("restore.resharded", "rank", SAME, rank=0, ranks=3 if scheme == "copy" else 2)]


def repairs(scheme: str) -> list[Kill]:
    """Kills while damage at rest is repaired, before a second save."""
    own, other = ("damage", "own", 1, 1), ("damage", "copy", 0, 1) if scheme == "copy" else ("damage", "parity", 1, 1)

    def kill(point: str, rank: int, damage: tuple[Any, ...]) -> Kill:
        return Kill(f"repair.{point}", "wipe", OLD, rank, verbs=(*SAVE, damage, *SAVE))

    return [kill("begun", 1, own), kill("blocks", 0, own), kill("copied", 1, other), kill("done", 1, other)]


def drains(scheme: str) -> list[Kill]:
    """Kills in a drain, and all memory is lost besides: the directory has the checkpoint, or the one before.

    A drain reads own slots, whatever protects them, so that with parity two kills will do.
    """
    rest = [point for point in POINTS if point.startswith("drain.") and point != "drain.ended"]
    kills = []
    for point in ("drain.ended", *(rest if scheme == "copy" else ["drain.verified"])):
        rank = 0 if point in ("drain.committing", "drain.uncommitted") else 1
        is_there = [*POINTS].index(point) >= [*POINTS].index("drain.committed")
        kills.append(Kill(point, "rank", NEW if is_there else DRAINED, rank, verbs=(*SAVE, ("drain",)), lost=True))
    return kills


def closes() -> list[Kill]:
    """Kills while all ranks close."""
    return [Kill(f"close.{point}", "wipe", NEW, verbs=SAVE) for point in ("asked", "freed")]


def by_turns(saving: Sequence[Kill], restoring: Sequence[Kill]) -> list[Kill]:
    """Kills in restores after kills in saves, which have cost a node."""
    return [kill for number, save in enumerate(saving) for kill in (save, *restoring[number : number + 1])]


class Chain:
    """Launches one after the other on the same memory. Close it.

    Args:
        root: a directory of a memory file system, of its own.
        scheme: of redundancy.
        imported: modules that trainers have, besides.
        is_lazy: whether a part of their state is copied after `save` has returned.
    """

    def __init__(self, root: Path, scheme: str, imported: Sequence[str] = (), is_lazy: bool = False):
        self._root, self._directory = root, root / "directory"
        self._scheme, self._is_lazy, self._ranks = scheme, is_lazy, RANKS[scheme]
        self._segments = segments()
        self._trainers = Trainers([*IMPORTED, *imported], root / "log", SMALL)
        self._launch, self._before = 0, "nothing"
        self._promised, self._drained = NOTHING, NOTHING
        self.failed: list[str] = []

    def close(self) -> None:
        """End whatever still runs."""
        self._trainers.close()
        _kill(_started_in(self._root))
        remove_segments(self._segments)

    def kill(self, kill: Kill) -> None:
        """Check what the last kill has left, and kill the next launch; where something is wrong, note it."""
        try:
            if self._promised == NOTHING and not kill.verbs:
                self.train()
            self._kill(kill)
            self._before = f"a kill at {kill.point}"
        except AssertionError as error:
            self.failed.append(f"{kill.point}, after {self._before}: {error}")
            self._clear()

    def train(self) -> None:
        """Check what the last kill has left, save once, and close."""
        out, pids = self._start(SAVE, [], self._ranks, drains=False)
        try:
            until(lambda: not any(map(self._trainers.run, pids)), lambda: f"the end of a training: {_state(out, pids)}")
        finally:
            self._trainers.end(pids)
        self._check_restored(out, self._ranks)
        assert len(read_records(out, "end")) == self._ranks, _log(out)
        self._promised = (self._promised[0] + 1, self._launch)
        self._before = "an end"

    def end(self) -> None:
        """Train to the end; then nothing has piled up, and nothing is left that runs."""
        try:
            self.train()
            until(lambda: not _started_in(self._root), "the end of all couriers", look_s=0.2)
            files = sorted(path.name for path in self._root.glob(f"node*/mlflash-{UID}/j/slot-*"))
            # Of each rank two own slots and two shares, of both one more where it drains, and two for others.
            assert len(files) == (6 if self._drained == NOTHING else 8) * self._ranks, files
            committed = sorted(path.parent.name for path in self._directory.glob("step-*/checkpoint.mlflash"))
            assert len(committed) == len([*self._directory.glob("step-*")]) == (self._drained != NOTHING), committed
        except AssertionError as error:
            self.failed.append(f"the end, after {self._before}: {error}")

    def _kill(self, kill: Kill) -> None:
        ranks, before = kill.ranks or self._ranks, self._promised
        path = [*kill.before, kill.point]
        traps = [{"path": path, "action": action, "rank": kill.rank} for action in ["pause"] * kill.waits + [kill.dies]]
        out, pids = self._start(kill.verbs, traps, ranks, drains=kill.lost)
        try:
            until(lambda: not all(map(self._trainers.run, pids)), lambda: f"a death: {_state(out, pids)}")
        finally:
            self._trainers.end(pids)  # as a launcher does
        self._check_restored(out, ranks if kill.verbs else 0)
        passed = out / f"passed-{kill.rank}-{len(traps) - 1}"
        assert passed.exists() and passed.stat().st_size == len(path), f"it did not come so far: {_log(out)}"
        assert len(read_records(out, "end")) < ranks, "it was over"
        # Of two saves in a row the first is killed.
        new = before[0] + kill.verbs.count(SAVE[0]) + kill.verbs.count(SAVE_TWO), self._launch
        old = new[0] - 1, self._launch
        if kill.lost:
            _kill(_started_in(out))
            self._wipe(*self._root.glob("node*"))
            self._drained = new if kill.back == NEW else self._drained
        if kill.ranks > self._ranks:
            self._wipe(self._root / f"node{self._ranks}")
        self._promised = {SAME: before, OLD: old, NEW: new, DRAINED: self._drained}[kill.back]

    def _start(self, verbs: Verbs, traps: list[dict[str, Any]], ranks: int, drains: bool) -> tuple[Path, list[int]]:
        self._launch += 1
        out = self._root / f"out-{self._launch}"
        out.mkdir()
        options: dict[str, Any] = {"redundancy": self._scheme if ranks >= self._ranks else "copy"}
        if drains or self._drained != NOTHING:
            options |= {"directory": str(self._directory), "drain_every": 1000, "keep_last": 1}
        spec = {"launch": self._launch, "verbs": verbs, "traps": traps, "options": options, "is_lazy": self._is_lazy}
        environment = {
            **os.environ, **SMALL, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error", "OUT": str(out),
            "TMPDIR": str(out), "MLFLASH_JOB": "j", "RANKS_PER_NODE": "1",
            "MLFLASH_TRANSPORT": TRANSPORTS[self._launch % 2],
            "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        }  # fmt: skip
        return out, [
            self._trainers.start(SCRIPT, json.dumps(spec), environment | self._of(rank), out / "log")
            for rank in range(ranks)
        ]

    def _of(self, rank: int) -> dict[str, str]:
        own = settings_of(rank, self._root)
        return {"RANK": str(rank), "MLFLASH_NODE": own["node"], "MLFLASH_MEMORY": own["memory"]}

    def _check_restored(self, out: Path, least: int) -> None:
        """Compare what ranks have restored with what was promised; so many of them have to have come so far."""
        records = read_records(out, "restored")
        restored = {(record["step"] or 0, record["launch"], str(record["wrong"])) for record in records}
        assert len(records) >= least, f"{len(records)} ranks have restored: {_log(out)}"
        step, launch = self._promised
        assert restored <= {(step, launch, "[]")}, f"expected step {step} of launch {launch}: {restored}: {_log(out)}"

    def _wipe(self, *folders: Path) -> None:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _clear(self) -> None:
        """Begin anew."""
        _kill(_started_in(self._root))
        self._wipe(self._directory, *self._root.glob("node*"))
        self._promised, self._drained, self._before = NOTHING, NOTHING, "nothing"


def _log(out: Path) -> str:
    return (out / "log").read_text()[-5000:]


def _state(out: Path, trainers: Sequence[int]) -> str:
    """What is known of a launch that hangs: what it printed, what each rank noted, and where its processes are."""
    noted = [path.read_text()[-500:] for path in sorted(out.glob("rank*.jsonl"))]
    dump = [str(Path(sys.executable).with_name("py-spy")), "dump", "--pid"]
    stacks = [
        subprocess.run([*dump, str(pid)], capture_output=True, text=True, timeout=30, check=False).stdout
        for pid in [*trainers, *_started_in(out)]
    ]
    return "\n".join([_log(out), *noted, *stacks])


def _started_in(root: Path) -> set[int]:
    """Agents and couriers whose records are below a directory; a forked trainer has the environment of its parent."""
    return with_variable(f"\0OUT={root}")


def _kill(pids: set[int]) -> None:
    send(signal.SIGKILL, pids)
    until(lambda: not any(map(runs, pids)), "the end of what was killed")


def run(kills: Sequence[Kill], *chained: Any) -> None:
    with contextlib.closing(Chain(*chained)) as chain:
        for kill in kills:
            chain.kill(kill)
        chain.end()
    assert not chain.failed, "\n\n".join(chain.failed)


CHAINS = {
    f"{scheme}: {name}": (scheme, kills)
    for scheme in RANKS
    for name, kills in {
        "saves and restores": by_turns(saves(scheme), restores(scheme)),
        "repairs and drains": [*repairs(scheme), *closes(), *drains(scheme)],
    }.items()
}
LAZY = [Kill("lazy.piece", dies, OLD, before=("commit.released",), verbs=SAVE * 2) for dies in ("wipe", "trainer")]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CHAINS)
def test_each_launch_restores_exactly_what_the_kill_before_it_has_left(shm: Path, name: str) -> None:
    scheme, kills = CHAINS[name]
    run(kills, shm, scheme)


def test_a_kill_while_a_state_is_copied_behind_save_leaves_the_step_before(shm: Path) -> None:
    run(LAZY, shm, "copy", ["torch", "torch._dynamo"], True)  # what a step of an optimizer imports


def test_each_point_is_killed_in_a_chain() -> None:
    """But for keep_alive, where ranks are lost that others outlive: tests/cluster/test_keep_alive.py kills there.

    And but for copies on disks: tests/faults/test_disk.py.
    """
    killed = {kill.point for _, kills in CHAINS.values() for kill in [*kills, *LAZY]}
    elsewhere = {"restore.copied", "keep.sealed", *(point for point in POINTS if point.startswith("round."))}
    assert killed == POINTS.keys() - elsewhere
