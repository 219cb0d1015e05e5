"""Corrupt what is saved, one bit or value at a time, and hold mlflash to what it claims of each class of faults.

    PYTHONPATH=tests/support mpiexec -n 3 python tests/campaigns/corrupt_campaign.py --seed 1 --trials 100

The classes are fixed here. Within each, rank, step, tensor, byte and bit are drawn uniformly; of bits in values those
that the checks claim to see, and those that no check can see, are rows of their own. In each trial three ranks on
emulated nodes save six steps. It is then asked whether the fault was caught before its step was certified, whether the
rank (or the file) was named, and whether what is restored has the bits of a training that nothing happens to.
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import damage
import holds
import in_couriers
import numpy as np
import torch
from emulated import on_node
from mpi4py import MPI

import mlflash
from mlflash.errors import SaveFailed, StepNotFound
from mlflash.state import layout

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
STEPS = 6
layout.BLOCK_NBYTES = 4096  # so that a small state has many
os.environ |= {"MLFLASH_TEST_BLOCK_NBYTES": "4096", in_couriers.NAME: "damaged_on_arrival"}
in_couriers.reach_into_couriers()
WEIGHTS, MOMENTS = ("model.embed", "model.head"), ("optim.exp_avg", "optim.exp_avg_sq")
TENSORS = (*WEIGHTS, *MOMENTS)
LEAP, LEAST, SURE = 128.0, 0.0625, 1.01  # as `protect.value_checks` has them; and what is sure to be beyond
ROWS = {
    "weight: a bit that makes it NaN, infinite or a leap": "named",
    "moment: a bit that makes it NaN, infinite or a leap": "named",
    "NaN in one value of one rank": "named",
    "stuck bit that makes values NaN, infinite or a leap": "named",
    "one replica of three: any bit": "named",
    "a bit on the wire": "refused",
    "a bit in a slot or a copy at rest": "repaired",
    "a bit in a drained file": "passed over",
    "weight or moment of one shard: any other bit": "",
}
"""Each class, and what is claimed of it; "": no check can see it."""


Change = Callable[[int, dict[str, Any]], None]


class Fault(NamedTuple):
    """What happens in a trial: to which rank, at which step, to which bit of which value of which tensor."""

    rank: int
    step: int
    tensor: str
    index: int
    bit: int


def clean(step: int, alike: bool) -> dict[str, Any]:
    """The state of this rank after a step in a training that nothing happens to."""
    rng = torch.Generator().manual_seed(0 if alike else 1 + RANK)
    normal = lambda *shape: torch.randn(*shape, generator=rng)
    drift = 1.0 + 1e-3 * step
    return {
        "model": {"embed": 0.02 * drift * normal(3000), "head": (0.05 * drift * normal(2000)).bfloat16()},
        "optim": {"exp_avg": 1e-3 * drift * normal(3000), "exp_avg_sq": 1e-6 * drift * normal(3000).square()},
        "step": step,
    }


def value_of(state: dict[str, Any], name: str) -> torch.Tensor:
    group, _, key = name.partition(".")
    value: torch.Tensor = state[group][key]
    return value


def flipped(values: torch.Tensor, fault: Fault, stuck: bool = False) -> torch.Tensor:
    """The values with one bit of one of them changed, or stuck at 1."""
    raw = values.clone().view(torch.uint8).numpy()
    at = fault.index * values.element_size() + fault.bit // 8
    raw[at] = raw[at] | (1 << fault.bit % 8) if stuck else raw[at] ^ (1 << fault.bit % 8)
    return torch.from_numpy(raw).view(values.dtype)


def is_seen(fault: Fault, stuck: bool) -> bool:
    """Whether the checks claim to see a fault: asked on the rank that has it."""
    seen = False
    if fault.rank == RANK:
        before = value_of(clean(fault.step, alike=False), fault.tensor)
        new = flipped(before, fault, stuck)[fault.index].double().abs()
        usual = max(LEAST, *(float(value_of(clean(s, False), fault.tensor).double().abs().max()) for s in range(1, 7)))
        seen = not bool(torch.isfinite(new)) or float(new) > SURE * LEAP * usual
    return bool(COMM.bcast(seen, fault.rank))


def draw(rng: random.Random, tensors: tuple[str, ...], seen: bool | None = None, stuck: bool = False) -> Fault:
    """Draw a fault, which the checks claim to see or not; None: either."""
    while True:
        tensor = rng.choice(tensors)
        values = value_of(clean(1, alike=False), tensor)
        fault = Fault(rng.randrange(SIZE), rng.randint(2, STEPS - 2), tensor, rng.randrange(values.numel()),
                      rng.randrange(8 * values.element_size()))  # fmt: skip
        if seen is None or is_seen(fault, stuck) is seen:
            return fault


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class Trial:
    """One run with a fault in an empty memory, and what became of it; ``alike``: all ranks hold the same."""

    def __init__(self, root: Path, heard: Heard, alike: bool = False):
        self.root, self.alike, self.heard = root, alike, heard
        self.heard.texts.clear()
        self.failed: list[int] = []
        own = on_node(root / "memory")
        self.options: dict[str, Any] = {**own, "job": "c", "comm": COMM, "transport": "p2p", "timeout_s": 60.0}

    def save(self, change: Change = lambda step, state: None, **more: Any) -> None:
        """Save all steps; ``change`` changes a state before it is saved."""
        folder = self.root / "drained" if "drain_every" in more else None
        more |= {"replicated": COMM} if self.alike else {}
        with mlflash.Checkpointer(folder, check_values=1.0, **self.options, **more) as ckpt:
            for step in range(1, STEPS + 1):
                state = clean(step, self.alike)
                change(step, state)
                try:
                    ckpt.save(step, state).wait()
                except SaveFailed:
                    self.failed.append(step)
                ckpt.steps()  # comes after what a save leaves behind
                if folder is not None:
                    ckpt.wait_drained()

    def restored(self, source: Path | None = None, **wanted: Any) -> tuple[int | None, bool]:
        """The step that is restored, and whether it is right on all ranks, bit for bit."""
        with mlflash.Checkpointer(**self.options) as ckpt:
            state = clean(0, self.alike)
            try:
                step = ckpt.restore(state, source=source, **wanted)
            except StepNotFound:  # nothing is certified
                step = None
            right = step is None
            if step is not None:
                expected = clean(step, self.alike)
                pairs = [(value_of(state, name), value_of(expected, name)) for name in TENSORS]
                same = [torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs]
                right = state["step"] == step and all(same)
        return step, all(COMM.allgather(right))

    def said(self, *parts: str) -> bool:
        """Whether any rank has said something that has all of some texts in it."""
        heard = any(all(part in text for part in parts) for text in self.heard.texts)
        return any(COMM.allgather(heard))


def from_then_on(fault: Fault, changed: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Change a tensor of one rank from a step on, as training goes on from it."""

    def change(step: int, state: dict[str, Any]) -> None:
        if fault.rank == RANK and step >= fault.step:
            group, _, key = fault.tensor.partition(".")
            state[group][key] = changed(state[group][key])

    return change


def in_values(trial: Trial, fault: Fault, stuck: bool = False, value: float | None = None) -> dict[str, bool]:
    """A value is wrong from a step on: one bit of it, or all of it."""

    def changed(values: torch.Tensor) -> torch.Tensor:
        if value is None:
            return flipped(values, fault, stuck)
        values[fault.index] = value
        return values

    trial.save(from_then_on(fault, changed), certify_after=1)
    named = trial.said(fault.tensor, f"rank {fault.rank} ")
    step, right = trial.restored(certified=True)
    return {"caught": step is None or step < fault.step, "named": named, "equal": right}


def in_replica(trial: Trial, fault: Fault) -> dict[str, bool]:
    change = from_then_on(fault, lambda values: flipped(values, fault))
    trial.save(change, certify_after=1, redundancy="copy", share=False)
    named = trial.said(f"{fault.tensor} (rank {fault.rank} on node{fault.rank} differs")
    step, right = trial.restored(certified=True)
    # It is named once, and not compared again: steps after it may be certified, and have the other bit.
    return {"caught": step != fault.step, "named": named, "equal": right or (step is not None and step > fault.step)}


def on_the_wire(trial: Trial, fault: Fault, rng: random.Random) -> dict[str, bool]:
    """A bit of what one rank receives in one save is another one."""
    how = f"{1 + rng.randrange(3)} {rng.randrange(8)} {rng.random()}"

    def change(step: int, state: dict[str, Any]) -> None:
        if fault.rank == RANK and step == fault.step:
            holds.at("arrival", how)
        elif step > fault.step:
            holds.let_go()

    trial.save(change)
    step, right = trial.restored()
    return {"caught": trial.failed == [fault.step], "named": trial.said("did not arrive whole"),
            "equal": right and step == STEPS}  # fmt: skip


def at_rest(trial: Trial, rng: random.Random) -> dict[str, bool]:
    """A bit of a file that holds the newest step is another one."""
    trial.save()
    number, bit, place = rng.random(), rng.randrange(8), rng.random()
    COMM.Barrier()
    name = ""
    if RANK == 0:
        files = [file for file in damage.headers(trial.root / "memory") if file[1].step == STEPS]
        path, header = files[int(number * len(files))]
        # Of the first page only header and records are anything; of the rest each byte is checked.
        extents = header.extents
        at = 4096 + int(place * (extents.body_nbytes + 8 * extents.blocks))
        at = at if at < 4096 + extents.body_nbytes else extents.table_start + at - 4096 - extents.body_nbytes
        damage.flip(path, at, bit=1 << bit)
        name = path.name
    name = COMM.bcast(name)
    step, right = trial.restored()
    said = trial.said(name) | trial.said("is damaged and will be made again")
    return {"caught": said, "named": said, "equal": right and step == STEPS}


def in_a_file(trial: Trial, rng: random.Random) -> dict[str, bool]:
    """A bit of a file of the newest drained checkpoint is another one."""
    trial.save(drain_every=1)
    number, bit, place = rng.random(), rng.randrange(8), rng.random()
    folder = f"step-{STEPS:08d}"
    COMM.Barrier()
    if RANK == 0:
        files = sorted(path for path in (trial.root / "drained" / folder).iterdir() if path.name != "verdict")
        path = files[int(number * len(files))]
        damage.flip(path, int(place * path.stat().st_size), bit=1 << bit)
        shutil.rmtree(trial.root / "memory")
    COMM.Barrier()
    on_node(trial.root / "memory")
    step, right = trial.restored(source=trial.root / "drained")
    # Bytes of HDF5 that say nothing of the state (gaps, names of attributes) do no harm.
    return {"caught": right, "named": trial.said(folder) or step == STEPS, "equal": right}


def run(row: str, trial: Callable[[bool], Trial], rng: random.Random) -> dict[str, bool]:
    match row.split(":")[0]:
        case "weight":
            return in_values(trial(False), draw(rng, WEIGHTS, seen=True))
        case "moment":
            return in_values(trial(False), draw(rng, MOMENTS, seen=True))
        case "NaN in one value of one rank":
            return in_values(trial(False), draw(rng, TENSORS), value=float("nan"))
        case "stuck bit that makes values NaN, infinite or a leap":
            return in_values(trial(False), draw(rng, TENSORS, True, stuck=True), stuck=True)
        case "one replica of three":
            return in_replica(trial(True), draw(rng, TENSORS))
        case "a bit on the wire":
            return on_the_wire(trial(False), draw(rng, WEIGHTS), rng)
        case "a bit in a slot or a copy at rest":
            return at_rest(trial(False), rng)
        case "a bit in a drained file":
            return in_a_file(trial(False), rng)
        case _:
            return in_values(trial(False), draw(rng, TENSORS, seen=False))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trials", type=int, default=20, help="of each class")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    assert SIZE >= 3, "a majority needs three ranks"
    heard = Heard()
    log = logging.getLogger("mlflash")
    log.addHandler(heard)
    log.propagate = False
    rng = random.Random(asked.seed)  # the same on all ranks
    counts: dict[str, collections.Counter[str]] = {row: collections.Counter() for row in ROWS}
    for row in ROWS:
        for _ in range(asked.trials):
            root = Path(COMM.bcast(tempfile.mkdtemp(prefix="mlflash-corrupt-", dir="/dev/shm") if RANK == 0 else None))
            if RANK == 0:
                (root / "memory").mkdir()
            COMM.Barrier()
            found = run(row, lambda alike, root=root: Trial(root, heard, alike), rng)
            everywhere = {key: all(COMM.allgather(value)) for key, value in found.items()}
            counts[row].update([key for key, value in everywhere.items() if value])
            COMM.Barrier()
            if RANK == 0:
                shutil.rmtree(root)
    if RANK == 0:
        print("| class | trials | caught before its step was certified | rank or file named | right bits restored |")
        print("|---|---|---|---|---|")
        for row, count in counts.items():
            claim = row if ROWS[row] else f"{row} (no check can see it)"
            print(f"| {claim} | {asked.trials} | {count['caught']} | {count['named']} | {count['equal']} |")
        if asked.out is not None:
            asked.out.write_text(json.dumps(counts, indent=1))
    wanted = [row for row, claim in ROWS.items() if claim]
    least = min(counts[row][key] for row in wanted for key in ("caught", "named", "equal")) / asked.trials
    return int(least < 0.99)


if __name__ == "__main__":
    np.seterr(all="ignore")
    sys.exit(main())
