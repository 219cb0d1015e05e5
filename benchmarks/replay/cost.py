"""Measures what a replayed step costs, in ordinary steps: `torchrun --nproc-per-node 2 benchmarks/replay/cost.py`.

Steps run in groups of three, in random order, and one of the three is replayed. Each step has forward, backward and
optimizer. The program prints the median of the ratios within the groups, with its 95 % interval. The control is the
ratio of the two ordinary steps.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mlflash.adapters.replay import Replay


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: nn.Module) -> nn.Module:
    for layer in model.children():
        fully_shard(layer)
    return fully_shard(model)


def model_of(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True) for _ in range(layers))
    )


def pairs(wrap: Callable[[nn.Module], nn.Module], args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Return the ratios of replayed to ordinary steps, and of ordinary to ordinary steps. Collective."""
    model = wrap(model_of(args.width, args.layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    check = Replay(model, 1, on_mismatch="raise")
    batch = torch.randn(args.batch, args.length, args.width)

    def step(replayed: bool) -> float:
        dist.barrier()
        begin = time.perf_counter()
        check.forward_backward(0, batch, loss) if replayed else loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        return time.perf_counter() - begin

    for replayed in (False, True, False):
        step(replayed)
    order, found, noise = random.Random(0), [], []
    for _ in range(args.pairs):
        kinds = [True, False, None]
        order.shuffle(kinds)
        seconds = {kind: step(kind is True) for kind in kinds}
        found.append(seconds[True] / seconds[False])
        noise.append(seconds[None] / seconds[False])
    return found, noise


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def told(ratios: list[float]) -> str:
    ratios = sorted(ratios)
    away = math.ceil(0.98 * math.sqrt(len(ratios)))
    middle = len(ratios) // 2
    return f"{statistics.median(ratios):.2f} ({ratios[middle - away]:.2f} to {ratios[middle + away]:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"width": 256, "layers": 2, "batch": 8, "length": 64, "pairs": 21}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    for wrap in (ddp, fsdp2):
        found, noise = pairs(wrap, args)
        if dist.get_rank() == 0:
            print(f"{wrap.__name__}: replayed step / ordinary step: {told(found)}; control: {told(noise)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
