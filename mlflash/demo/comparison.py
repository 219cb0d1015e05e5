"""What a run of the demo found, in a few lines; and how its final tensors compare."""

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
    """What the ranks of one launch wrote down.

    Attributes:
        ready: the line each rank wrote after its restore, by rank.
        done: the line each rank wrote at its end, by rank.
        last_step: the last step each rank finished, by rank.
        step_s: seconds of each step of rank 0.
        loss: of the last step that rank 0 finished, nats per byte.
    """

    ready: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    done: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    last_step: dict[int, int] = dataclasses.field(default_factory=dict)
    step_s: list[float] = dataclasses.field(default_factory=list)
    loss: float = float("nan")

    def note(self, rank: int, line: dict[str, Any]) -> None:
        """Take a line of a rank's log in."""
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
    """Say which step a launch took up, and where each rank's state came from."""
    step = told.ready[0]["restored"]
    if step is None:
        return "nothing: memory had no whole checkpoint, so training began again"
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
    """Give ``(what, how long)`` for each verb, and the stall of training against a memcpy.

    Of the verbs that happen once the slowest rank counts; of the saves the median over ranks and saves. The
    first save of each launch makes the slots, so it stands alone.
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
            ("", f"{first:.4f} s the first time in a launch, when the slots are made"),
        ]
    if saves:
        commit = statistics.median(save["commit_s"] for save in saves)
        rows.append(("commit", f"{commit:.4f} s from save to commit, in the background"))
    if relaunched.ready[0]["restored"] is not None:
        for verb, said in (
            ("find and fetch", "to choose, verify and fetch"),
            ("load", "into live tensors"),
            ("heal", "to check the copies and make those that are missing, in the background"),
        ):
            rows.append((verb, f"{max(s.get(verb, 0.0) for s in seconds):.4f} s {said}"))
    return rows


def print_rows(console: Console, rows: Iterable[tuple[str, str]]) -> None:
    """Print ``(what, text)``, each in a line."""
    for name, text in rows:
        console.print(f"{name:<14} {text}", highlight=False, soft_wrap=True, markup=False)


def differences(reference: Path, found: Path, ranks: int) -> list[str]:
    """Compare the final tensors of two launches, bit by bit; each line names one that differs, and where."""
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
