"""Replay the steps of a small language model on a GPU: no alarm where there is no fault, each fault found and named.

    PYTHONPATH=tests/support python -m torch.distributed.run --standalone --nproc-per-node 3 \\
        tests/campaigns/replay_on_gpu.py [--on cpu] [--steps 100]

All ranks share one GPU, by NCCL: each says that it is on a machine of its own, as NCCL wants no two of one machine on
the same GPU. For each wrapper, precision, attention kernel and with deterministic algorithms or without, it prints in
JSON how many of the replays without a fault differ and by how much, how many of the faults (one bit of one gradient of
one rank) were found and how many with the right rank, and what a replayed step takes. It is no part of CI, which has
no GPU. --on cpu shows whether the script itself works.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from gradient_faults import Bit
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from mlflash.adapters.replay import Mismatch, Replay

RANK = int(os.environ["RANK"])
HEADS, LAYERS, BATCH = 8, 4, 8
WORDS, WIDTH, LENGTH = 8192, 512, 256  # --on cpu takes less
RATIOS = 11
KERNELS = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.1, "gelu", batch_first=True, norm_first=True)
        layer.self_attn.dropout = 0.0
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        x = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        logits: torch.Tensor = self.head(self.layers(x, mask, is_causal=True))
        return logits


class Training:
    """A model of this wrapper, and its steps; all ranks have the same parameters and batches of their own."""

    def __init__(self, device: str, wrapper: str, precision: str, kernel: str):
        torch.manual_seed(0)
        self.device, self._kernel = device, kernel
        inner = Model().to(device)
        self._mixed = precision == "bfloat16"
        self._bits = {name: Bit(parameter, parameter.numel() // 3, 30) for name, parameter in inner.named_parameters()}
        self.model: nn.Module = inner
        if wrapper == "ddp":
            self.model = DistributedDataParallel(inner)
        else:
            for layer in inner.layers.layers:
                fully_shard(layer)
            self.model = fully_shard(inner)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self, check: Replay | None, number: int, broken: str = "") -> float:
        """Do a step, with the gradient of this parameter broken on this rank, and give its seconds."""
        random_words = torch.Generator().manual_seed(1000 * number + RANK)
        batch = torch.randint(WORDS, (BATCH, LENGTH), generator=random_words).to(self.device)
        for name, bit in self._bits.items():
            bit.is_armed = name == broken
        self._wait()
        begin = time.perf_counter()
        if check is None:
            self._loss(self.model, batch).backward()
        else:
            check.forward_backward(number, batch, self._loss)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._wait()
        return time.perf_counter() - begin

    def _loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        mixed = torch.autocast(self.device, torch.bfloat16) if self._mixed else contextlib.nullcontext()
        with mixed, sdpa_kernel(KERNELS[self._kernel]):
            logits = model(batch)[:, :-1].reshape(-1, WORDS)
        return nn.functional.cross_entropy(logits.float(), batch[:, 1:].reshape(-1))

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()


def tried(training: Training, steps: int, faults: int, breaks: list[str]) -> dict[str, Any]:
    """Steps that are sound, then faults, one a step, then what a replayed step takes. Collective."""
    found: list[list[Mismatch]] = []
    check = Replay(training.model, 1, on_mismatch=found.append)
    number = itertools.count(1)
    for _ in range(steps):
        training.step(check, next(number))
    alarms, largest = len(found), check.largest
    bounded = Replay(training.model, 1, on_mismatch=found.append, bound=0.0 if alarms == 0 else 10 * largest)
    caught = named = 0
    choose = random.Random(0)
    for _ in range(faults):
        wrong, name = choose.randrange(dist.get_world_size()), choose.choice(breaks)
        del found[:]
        training.step(bounded, next(number), name if wrong == RANK else "")
        caught += bool(found)
        culprits = {fault.culprit.rank for fault in found[0] if fault.culprit} if found else set()
        named += culprits == {wrong}
    ratios = []
    bounded = Replay(training.model, 1, on_mismatch=found.append, bound=math.inf)
    for _ in range(RATIOS if training.device == "cuda" else 1):
        plain = training.step(None, next(number))
        ratios.append(training.step(bounded, next(number)) / plain)
    return {"replays": steps, "differ": alarms, "largest": largest, "faults": faults, "caught": caught, "named": named,
            "step_s": round(plain, 4), "replayed_step_in_steps": round(statistics.median(ratios), 2)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--steps", type=int, default=100, help="sound ones, for each kind of training")
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--precisions", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=list(KERNELS), help="of attention")
    args = parser.parse_args()
    if args.on == "cpu":
        global WORDS, WIDTH, LENGTH
        WORDS, WIDTH, LENGTH = 64, 32, 16
    else:
        os.environ["NCCL_HOSTID"] = str(os.getpid())
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if args.on == "cuda" else "gloo")
    kernels = args.kernels if args.on == "cuda" else ["math"]
    for wrapper, precision, kernel, settled in itertools.product(
        ("ddp", "fsdp2"), args.precisions, kernels, (False, True)
    ):
        if kernel == "flash" and precision == "float32":
            continue  # there is no such kernel
        torch.use_deterministic_algorithms(settled)
        training = Training(args.on, wrapper, precision, kernel)
        # FSDP2 gathers parameters into others, whose gradients the hooks of `Bit` do not see.
        says = tried(training, args.steps, args.faults if wrapper == "ddp" else 0, list(training._bits))
        if RANK == 0:
            kind = {"wrapper": wrapper, "precision": precision, "attention": kernel, "deterministic": settled}
            print(json.dumps({**kind, **says}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
