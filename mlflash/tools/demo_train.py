"""The program of one rank: train a small GPT under DDP over gloo, with mlflash.

    mpiexec -n 4 python -m mlflash.tools.demo_train --steps 20 --folder /tmp/results

Start it again after a failure with the same ``MLFLASH_JOB``, and it continues where it was. Under ``mlflash run
--keep-alive`` it continues in the same process. ``state`` has everything that a step changes; the batch follows from
the number of the step.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mlflash
from mlflash.adapters.distributed import init_process_group

BATCH, CONTEXT = 4, 128
SAVE_EVERY = 2  # steps


class GPT(nn.Module):  # type: ignore[misc]
    """A model that predicts the next byte. Input and output embedding are the same tensor."""

    def __init__(self, context: int, width: int = 128, depth: int = 5, heads: int = 4, dropout: float = 0.1):
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, F.gelu, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens: Any, targets: Any) -> Any:
        """Return the mean cross-entropy in nats of bytes and the bytes that follow them, both ``(batch, length)``."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def read_text() -> Any:
    """Return a text that every machine has, the help texts of CPython's ``pydoc_data``, as bytes."""
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)


def batch_of(text: Any, step: int, rank: int, size: int, seed: int) -> tuple[Any, Any]:
    """Return the bytes of a rank for a step, and the bytes that follow them. Each epoch has its own order."""
    windows = (len(text) - 1) // CONTEXT
    epoch, place = divmod(step - 1, windows // (size * BATCH))
    order = torch.randperm(windows, generator=torch.Generator().manual_seed(seed + epoch))
    starts = order[(place * size + rank) * BATCH :][:BATCH] * CONTEXT
    rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts]).long()
    return rows[:, :-1], rows[:, 1:]


def settle_buckets(ddp: Any, context: int) -> None:
    """Make DDP put its buckets into their final order. Collective over its ranks.

    DDP does this once, after its first backward. The rounding of gloo's sum over the ranks depends on the place of a
    gradient in a bucket. Without this call, the first step after a relaunch would not be bit-identical to the same step
    of an uninterrupted run.
    """
    nothing = torch.zeros((1, context), dtype=torch.long)
    ddp(nothing, nothing).backward()
    ddp.zero_grad()


def final_tensors(model: Any, optimizer: Any) -> dict[str, np.ndarray]:
    """Return all tensors that decide how training would continue, by name."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        tensors |= {f"optimizer.{name}.{key}": tensor for key, tensor in optimizer.state[parameter].items()}
    tensors["rng.torch"] = torch.get_rng_state()
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def main() -> None:
    """Train to the last step, from the checkpoint in memory if there is one. Collective over all ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True, help="for logs and final tensors")
    parser.add_argument("--memory", type=Path, help="memory of which each emulated node has a part")
    parser.add_argument("--ranks-per-node", type=int, help="how many ranks such a node has")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    init_process_group()
    model, text = GPT(CONTEXT), read_text()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    settle_buckets(ddp, CONTEXT)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": mlflash.rng()}

    def log(event: str, **facts: Any) -> None:
        # Not through mpiexec: output that it has not yet forwarded is lost when a rank dies.
        with (args.folder / f"rank{distributed.get_rank()}.jsonl").open("a") as file:
            file.write(json.dumps({"event": event, "time": time.time(), **facts}) + "\n")

    def train(ckpt: mlflash.Checkpointer, start: int) -> None:
        rank, size = distributed.get_rank(), distributed.get_world_size()
        log("start", pid=os.getpid(), step=start, survives=ckpt.survives, source=ckpt.report()["restored_from"])
        if start == 0:
            torch.manual_seed(args.seed + 1 + rank)  # each rank has its own dropout
        for step in range(start + 1, args.steps + 1):
            optimizer.zero_grad()
            loss = ddp(*batch_of(text, step, rank, size, args.seed))
            loss.backward()
            optimizer.step()
            scheduler.step()
            if step % SAVE_EVERY == 0:
                snapshot = ckpt.save(step, state)
                if step == SAVE_EVERY:
                    snapshot.wait()  # from here on, all ranks can go back to a step
            log("step", step=step, loss=loss.item())
        ckpt.wait()

    settings: dict[str, str] = {}
    if args.memory is not None:
        settings["node"] = f"node{distributed.get_rank() // args.ranks_per_node}"
        settings["memory"] = str(args.memory / settings["node"])
        (args.memory / settings["node"]).mkdir(0o700, parents=True, exist_ok=True)
    mlflash.keep_alive(train, state, **settings)
    tensors: dict[str, Any] = final_tensors(model, optimizer)
    np.savez(args.folder / f"rank{distributed.get_rank()}.npz", **tensors)


if __name__ == "__main__":
    main()
