"""Computes the time from a failure to a state on all GPUs, and compares it with what others published.

    python benchmarks/scale/recoveries.py [--json FILE] [--plot benchmarks/scale/plot-model.svg]

It also computes what would make mlflash slower. The model's figures do not include process groups of torch.distributed,
compilation and the first step. Most of the published figures do.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import string
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scale import forecast, model
from scale.model import Machine
from scale.parameters import (
    LEAVE_S,
    LIBFABRIC,
    LOST_AFTER_S,
    PERLMUTTER,
    RELAUNCH_S,
    SLINGSHOT_11,
    TECTONIC,
    UCX,
    FileSystem,
    Node,
    WireUp,
)

from mlflash.placement.redundancy_scheme import parse

if TYPE_CHECKING:
    from scale.break_even import Condition

COPY = parse("copy")


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to recover from a failure.

    Attributes:
        label: its name in tables and plots.
        seconds: gives the seconds on a machine.
        wire_up: how couriers find each other.
        is_ours: whether mlflash does it.
    """

    label: str
    seconds: Callable[[Machine], float]
    wire_up: WireUp = LIBFABRIC
    is_ours: bool = True

    def of(self, gpus: int, node: Node) -> float:
        """Give the seconds on this number of GPUs."""
        return self.seconds(Machine(gpus, node, SLINGSHOT_11, wire_up=self.wire_up))


def in_place_s(machine: Machine, node_lost: bool, noticed_s: float = 0.0) -> float:
    """Compute a recovery in place: survivors leave their step, couriers reconnect, and all ranks restore.

    Args:
        node_lost: whether the spare is on another node, and fetches what it lacks.
        noticed_s: time until the failure is noticed. It is 0 if a process or a connection ends.
    """
    return noticed_s + LEAVE_S + model.restored_s(machine, COPY, node_lost)


def relaunched_s(machine: Machine) -> float:
    """Compute a relaunch of all ranks and a restore from memory, after a node was lost."""
    return RELAUNCH_S + model.restored_s(machine, COPY)


def _from(pfs: FileSystem) -> Callable[[Machine], float]:
    return lambda machine: RELAUNCH_S + model.pfs_restored_s(machine, pfs)


WAYS = (
    Way("in place, a process is killed", lambda machine: in_place_s(machine, False)),
    Way("in place, a node crashes", lambda machine: in_place_s(machine, True)),
    Way("in place, a node crashes, UCX", lambda machine: in_place_s(machine, True), UCX),
    Way("in place, a power cut", lambda machine: in_place_s(machine, True, LOST_AFTER_S)),
    Way("relaunch, memory", relaunched_s),
    Way(f"relaunch, PFS, {PERLMUTTER.name}", _from(PERLMUTTER), is_ours=False),
    Way(f"relaunch, PFS, {TECTONIC.name}", _from(TECTONIC), is_ours=False),
)


@dataclasses.dataclass(frozen=True)
class Published:
    """A recovery that somebody else published.

    Attributes:
        system: name of the system.
        gpus: number of GPUs.
        seconds: time of the recovery.
        sign: "≤" or "≥" if a bound was published, else empty.
        conditions: conditions of the figure.
        source, address: title and URL.
    """

    system: str
    gpus: int
    seconds: float
    sign: str
    conditions: str
    source: str
    address: str


_HYPERPOD = (
    "Checkpointless training on Amazon SageMaker HyperPod: Production-scale training with faster fault recovery",
    "https://aws.amazon.com/blogs/machine-learning/checkpointless-training-on-amazon-sagemaker-hyperpod-"
    "production-scale-training-with-faster-fault-recovery",
)
_FT_HSDP = ("Training LLMs with Fault Tolerant HSDP on 100,000 GPUs", "https://arxiv.org/abs/2602.00277")
PUBLISHED = (
    Published(
        "HyperPod, checkpointless", 256, 47, "", "Llama 3 70B, H100; from checkpoints 4 min 52 s", *_HYPERPOD
    ),
    Published(
        "HyperPod, checkpointless", 2304, 120, "≤", "an internal model, H100; from checkpoints 15 to 30 min",
        *_HYPERPOD,
    ),
    Published(
        "FlashRecovery", 4800, 150, "", "from healthy replicas, without checkpoints; devices, not GPUs",
        "FlashRecovery: Fast and Low-Cost Recovery from Failures for Large-Scale Training of LLMs",
        "https://arxiv.org/abs/2509.03047",
    ),
    Published(
        "ByteDance, before ByteRobust", 10_000, 600, "≥",
        "failover is \"often more than 10 minutes\". ByteRobust: only ratios, 10.87 times faster than to queue again",
        "Robust LLM Training Infrastructure at ByteDance", "https://arxiv.org/abs/2509.16293",
    ),
    Published(
        "MegaScale", 12_288, 900, "≤",
        "catches up \"within 15 minutes\", lost steps included; on \"more than 10,000 GPUs\", here its largest run",
        "MegaScale: Scaling Large Language Model Training to More Than 10,000 GPUs", "https://arxiv.org/abs/2402.15627",
    ),
    Published(
        "Llama 3", 16_384, 0.1 * 54 * 86_400 / 466, "≤",
        "computed here from more than 90 % effective training time, 54 days, 466 interruptions; lost steps included",
        "The Llama 3 Herd of Models, 3.3.4", "https://arxiv.org/abs/2407.21783",
    ),
    Published("Meta, synchronous", 100_000, 600, "", "stall of a recovery, \"O(100K) GPUs\"", *_FT_HSDP),
    Published("Meta, FT-HSDP", 100_000, 180, "", "the same; other replicas continue to train", *_FT_HSDP),
)  # fmt: skip


def lettered() -> Iterator[tuple[str, Published]]:
    """Give what others published, each with its letter in plot and table."""
    return zip(string.ascii_lowercase, PUBLISHED, strict=False)


def terms(machine: Machine) -> dict[str, float]:
    """Give the parts of a recovery in place after a node crashed, in seconds."""
    moved = model.moved_s(machine, COPY, node_lost=False)
    return {
        "leave the step": LEAVE_S,
        "couriers find each other": model.wire_up_s(machine),
        "tables, agreement": model.agreed_s(machine),
        "verify every byte, to the GPU": moved,
        "fetch, and verify": model.moved_s(machine, COPY) - moved,
    }


def main() -> int:
    from bench.table import Grid, markdown, show
    from scale import break_even

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--markdown", action="store_true", help="print the tables in Markdown")
    parser.add_argument("--plot", type=Path, help="draw commits, restores and recoveries to this file")
    args = parser.parse_args()
    node, few = Node(), forecast.FEW
    heads = [f"{gpus:,} GPUs" for gpus in few]
    ways = [[way.label, *(f"{way.of(gpus, node):,.1f}" for gpus in few)] for way in WAYS]
    by_size = [terms(Machine(gpus, node, SLINGSHOT_11)) for gpus in few]
    parts = [[name, *(f"{one[name]:.2f}" for one in by_size)] for name in by_size[0]]
    found = list(break_even.conditions(node))
    others = [[letter, one.system, f"{one.gpus:,}", f"{one.sign} {one.seconds:,.0f}".strip(), one.conditions,
               f"[{one.source}]({one.address})"] for letter, one in lettered()]  # fmt: skip
    grids = [
        Grid("From a failure to a state on all GPUs in the model, s", ["way", *heads], ways),
        Grid("Parts of a recovery in place after a node crashed, s", ["what", *heads], parts),
        Grid("Published by others", ["", "system", "GPUs", "s", "conditions", "source"], others),
        Grid("When mlflash is slower", ["what", "assumed", *heads], list(_lines(found, few))),
    ]  # fmt: skip
    if args.markdown:
        print("\n".join(map(markdown, grids)))
    else:
        show({}, grids)
    if args.json is not None:
        args.json.write_text(json.dumps({
            "ways": {way.label: {gpus: way.of(gpus, node) for gpus in forecast.GPUS} for way in WAYS},
            "terms": dict(zip(few, by_size, strict=True)), "published": [dataclasses.asdict(one) for one in PUBLISHED],
            "conditions": [dataclasses.asdict(one) for one in found],
        }, indent=1))  # fmt: skip
    if args.plot is not None:
        from scale import plots

        plots.draw_model(args.plot, list(forecast.points(node)))
    return 0


def _lines(found: list[Condition], few: tuple[int, ...]) -> Iterator[list[str]]:
    for one in found:
        assumed = "" if one.assumed is None else _said(one.assumed, one.unit)
        if 0 in one.at:
            yield [one.what, assumed, _said(one.at[0], one.unit), *[""] * (len(few) - 1)]
        else:
            yield [one.what, assumed, *(_said(one.at[gpus], one.unit) for gpus in few)]


def _said(value: float | None, unit: str) -> str:
    if value is None:
        return "never"
    if math.isinf(value):
        return "always"
    return f"{float(f'{value:.2g}'):,g} {unit}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
