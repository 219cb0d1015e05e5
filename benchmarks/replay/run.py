"""Measures what a replayed step costs, in ordinary steps, with DDP and with FSDP2.

    python benchmarks/replay/run.py [--repetitions 21] [--quick] [--json FILE]

Steps of two ranks run in groups of three, in random order, and one of the three is replayed. Each step has forward,
backward and optimizer. A ratio compares two steps of a group. The control is the ratio of the two ordinary steps.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import torch.distributed as dist
from bench.clock import Bench
from bench.launch import Part
from bench.question import Question, parser_of
from bench.rows import row
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mlflash.adapters.distributed import init_process_group
from mlflash.adapters.replay import Replay

WIDTH, LAYERS, BATCH, LENGTH = 256, 2, 8, 64
ORDINARY = "an ordinary step"
UNTIMED = 3


def replays(bench: Bench) -> None:
    """Time replayed and ordinary steps of both kinds of model."""
    init_process_group(comm=bench.comm)
    for name in ("DDP", "FSDP2"):
        seconds = groups(model_of(name), bench.repetitions)
        over = {ORDINARY: np.array(seconds["ordinary"])}
        bench.rows(row(f"{name}: a replayed step", np.array(seconds["replayed"]), over),
                   row(f"{name}: control, another ordinary step", np.array(seconds["control"]), over))  # fmt: skip
    dist.destroy_process_group()


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True) for _ in range(LAYERS))
    model = nn.Sequential(*layers)
    if name == "DDP":
        return DistributedDataParallel(model)
    for layer in model.children():
        fully_shard(layer)
    return fully_shard(model)


def groups(model: nn.Module, repetitions: int) -> dict[str, list[float]]:
    """Time groups of three steps. Collective."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    replay = Replay(model, 1, on_mismatch="raise")
    batch = torch.randn(BATCH, LENGTH, WIDTH)

    def step(is_replayed: bool) -> float:
        dist.barrier()
        start = time.perf_counter()
        replay.forward_backward(0, batch, loss) if is_replayed else loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        return time.perf_counter() - start

    for number in range(UNTIMED):
        step(number == 1)
    seconds: dict[str, list[float]] = {"replayed": [], "ordinary": [], "control": []}
    order = random.Random(0)
    for _ in range(repetitions):
        for kind in order.sample(list(seconds), len(seconds)):
            seconds[kind].append(step(kind == "replayed"))
    return seconds


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def main() -> int:
    args = parser_of(__doc__, repetitions=21).parse_args()
    if args.quick:
        args.repetitions = 2
    return Question(args).run([Part(2, replays, per_node=2)])


if __name__ == "__main__":
    sys.exit(main())
