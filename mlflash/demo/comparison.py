"""The results of the demo in a few lines, and the comparison of its final tensors."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ..placement.topology import Topology


@dataclasses.dataclass
class Told:
    """What the ranks of one launch logged.

    Attributes:
        ready: the line that each rank logged after its restore, by rank.
        done: the line that each rank logged at its end, by rank.
        last_step: the last step that each rank finished, by rank.
        step_s: seconds of each step of rank 0.
        loss: loss of the last step that rank 0 finished, in nats per byte.
    """

    ready: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    done: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    last_step: dict[int, int] = dataclasses.field(default_factory=dict)
    step_s: list[float] = dataclasses.field(default_factory=list)
    loss: float = float("nan")

    def note(self, rank: int, line: dict[str, Any]) -> None:
        """Add a line of a rank's log."""
        if line["event"] == "ready":
            self.ready[rank] = line
            self.last_step[rank] = line["restored"] or 0
        elif line["event"] == "step":
            self.last_step[rank] = line["step"]
            if rank == 0:
                self.step_s.append(line["seconds"])
                self.loss = line["loss"]
        elif line["event"] == "done":
            self.done[rank] = line


def describe_origin(told: Told, topology: Topology) -> str:
    """Say which step a launch restored, and where each rank's state came from."""
    step = told.ready[0]["restored"]
    if step is None:
        return "nothing: memory had no complete checkpoint, so training began from the start"
    here = [rank for rank, line in sorted(told.ready.items()) if line["own_node"]]
    away = [rank for rank, line in sorted(told.ready.items()) if not line["own_node"]]
    origins = []
    if here:
        origins.append(f"{_ranks(here)} from {_its(here)} own node's memory")
    if away:
        partners = [partner for rank in away for partner in told.done[rank]["partners"]]
        nodes = sorted({topology.name_of(partner) for partner in partners})
        origins.append(f"{_ranks(away)} from the copies that {_ranks(partners)} held on {', '.join(nodes)}")
    return f"step {step}: {'; '.join(origins)}"


def _ranks(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def _its(ranks: list[int]) -> str:
    return "their" if len(ranks) > 1 else "its"


def describe_seconds(launches: Iterable[Told], relaunched: Told) -> list[tuple[str, str]]:
    """Return ``(what, how long)`` for each operation, and the stall of training against a memcpy.

    For operations that happen once, the slowest rank counts. For saves, the median over ranks and saves counts. The
    first save of each launch makes the slots, so it has its own line.
    """
    ends = [line for told in launches for line in told.done.values()]
    firsts = [line["saves"][0] for line in ends if line["saves"]]
    saves = [save for line in ends for save in line["saves"][1:]]
    memcpys = [seconds for line in ends for seconds in line["memcpy_s"]]
    seconds = [line["seconds"] for line in relaunched.done.values()]
    rows = []
    if saves and memcpys:
        stall, first = (statistics.median(save["stall_s"] for save in some) for some in (saves, firsts))
        memcpy = statistics.median(memcpys)
        size = f"{saves[0]['nbytes'] / (1 << 20):.1f} MiB in {ends[0]['tensors']} tensors"
        rows += [
            ("save", f"stall {stall:.4f} s, the median of {len(saves)} saves of {size}, per rank"),
            ("", f"{stall / memcpy:.1f} times a plain memcpy of the same bytes, {memcpy:.4f} s"),
            ("", f"{first:.4f} s for the first save of a launch, which makes the slots"),
        ]
    if saves:
        commit = statistics.median(save["commit_s"] for save in saves)
        rows.append(("commit", f"{commit:.4f} s from save to commit, in the background"))
    if relaunched.ready[0]["restored"] is not None:
        for verb, said in (
            ("find and fetch", "to choose, verify and fetch"),
            ("load", "into live tensors"),
            ("heal", "to check the copies and make missing ones, in the background"),
        ):
            rows.append((verb, f"{max(s.get(verb, 0.0) for s in seconds):.4f} s {said}"))
    return rows


def print_rows(console: Console, rows: Iterable[tuple[str, str]]) -> None:
    """Print each ``(what, text)`` as a line."""
    for name, text in rows:
        console.print(f"{name:<14} {text}", highlight=False, soft_wrap=True, markup=False)


def differences(reference: Path, found: Path, ranks: int) -> list[str]:
    """Compare the final tensors of two launches bit by bit. Each line names a tensor that differs, and its ranks."""
    differ: dict[str, dict[int, str]] = {}
    for rank in range(ranks):
        with np.load(reference / f"rank{rank}.npz") as wanted, np.load(found / f"rank{rank}.npz") as got:
            for name in {*wanted.files, *got.files}:
                if name not in wanted.files or name not in got.files:
                    said: str | None = "only in one of the two runs"
                else:
                    said = _difference(wanted[name], got[name])
                if said is not None:
                    differ.setdefault(name, {})[rank] = said
    return [f"{name}, {_ranks(where)}: {next(iter(where.values()))}" for name, where in sorted(differ.items())]


def _difference(wanted: np.ndarray, got: np.ndarray) -> str | None:
    if (wanted.dtype, wanted.shape) != (got.dtype, got.shape):
        return f"{wanted.dtype}{list(wanted.shape)} against {got.dtype}{list(got.shape)}"
    one, other = (array.reshape(-1).view(np.uint8).reshape(array.size, -1) for array in (wanted, got))
    count = int((one != other).any(axis=1).sum())
    if not count:
        return None
    with np.errstate(invalid="ignore"):
        largest = np.abs(wanted.astype(np.float64) - got.astype(np.float64)).max()
    return f"{count} of {wanted.size} numbers differ, by up to {largest:.3g}"
