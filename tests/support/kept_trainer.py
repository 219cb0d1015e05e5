"""A training for tests of `mlflash run --keep-alive`: it goes on in the same processes when others are lost.

Usage: kept_trainer.py OUT LAST [JSON]. Each rank adds a line for each step to OUT/steps-RANK, and writes a digest of
its final state to OUT/end-RANK. Each process notes in OUT/waits-HOST-PID that it is about to wait for a rank. JSON:

- ``kind`` of the model (ddp, compiled, fsdp, hsdp, tp), its ``device`` and ``dropout``, its ``optimizer``, ``settings``
  of the Checkpointer, ``pause`` seconds a step; ``waits``: each step waits for the commit of its save;
  ``until``: saves copy until the optimizer steps, and weights are large enough for that;
- ``die``: a list of rank, step and place, at each of which the process that has this rank kills itself once;
  ``die_in``: a list of rank and crash point of a recovery, at each of which it does so;
- ``hang``: a list of rank and step, at each of which the process that has this rank waits for ever, once;
- ``attacked``: who attacks it writes a rank and a place, or a crash point, into OUT/die, and the process that takes the
  file dies there;
- ``digests``: what is noted of the state in OUT/digests-RANK, "entries": at each entry, "steps": after each step;
- ``hold_at``: the step that rank 0 does not begin before there is a file "go on"; ``holds``: steps, each of which it
  does not begin before there is a file "go on STEP";
- ``stops``: it ends after the step in the file OUT/stop, which is there in time.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from digests import digest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset
from waiting import take, until

import mlflash
from mlflash import crash_points
from mlflash.adapters.distributed import init_process_group
from mlflash.run.decider_link import decider, is_spare

OUT, LAST = Path(sys.argv[1]), int(sys.argv[2])
OPTIONS: dict[str, Any] = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
KIND, DEVICE = OPTIONS.get("kind", "ddp"), OPTIONS.get("device", "cpu")
WIDTH, BATCH, LATE_S = 160 if OPTIONS.get("until") else 32, 8, 8
OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True, foreach=True),
}
WAITED = is_spare()  # for a rank, when it was started


def die(step: int, place: str) -> None:
    """Be killed here, where that is asked for, once."""
    rank = dist.get_rank()
    hangs = OUT / f"hung-{rank}-{step}"
    if [rank, step] in OPTIONS.get("hang", []) and not hangs.exists():
        hangs.touch()
        threading.Event().wait()
    if [rank, step, place] in OPTIONS.get("die", []):
        once(OUT / f"died-{rank}-{step}-{place}")
    die_if_told(str(rank), place)


def die_if_told(rank: str, place: str) -> None:
    """Be killed here, if who attacks this training wants that."""
    told = OUT / "die"
    if OPTIONS.get("attacked") and place == "forward" and told.exists() and told.read_text() == f"{rank} hang":
        told.write_text(str(time.time()))
        told.rename(OUT / "died")
        threading.Event().wait()
    if OPTIONS.get("attacked") and told.exists() and told.read_text() == f"{rank} {place}":
        told.write_text(str(time.time()))
        told.rename(OUT / "died")
        os.kill(os.getpid(), signal.SIGKILL)


def once(mark: Path) -> None:
    """Be killed here, if nobody was before."""
    if not mark.exists():
        mark.write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)


class Numbers(Dataset):  # type: ignore[misc]
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.drop = nn.Dropout(OPTIONS.get("dropout", 0.1))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.drop(layer(x)).relu()
            die(self.step, "forward")
        if x.requires_grad:
            x.register_hook(lambda gradient: die(self.step, "backward"))
        out: torch.Tensor = self.norm(x)
        return out


def wrapped(model: Model) -> nn.Module:
    if KIND == "compiled":
        for layer in model.layers:
            layer.compile(backend="aot_eager")
    if KIND in ("ddp", "compiled"):
        return nn.parallel.DistributedDataParallel(model)
    size = dist.get_world_size()
    if KIND == "tp":  # every second layer by columns
        style = ColwiseParallel(output_layouts=Replicate())
        return parallelize_module(model, init_device_mesh(DEVICE, (size,)), {"layers.0": style, "layers.2": style})
    mesh = (
        init_device_mesh(DEVICE, (size,))
        if KIND == "fsdp"
        else init_device_mesh(DEVICE, (size // 2, 2), mesh_dim_names=("replicas", "shards"))
    )
    for layer in (*model.layers, model):
        fully_shard(layer, mesh=mesh)
    return model


torch.manual_seed(0)
init_process_group()
os.environ["NCCL_HOSTID"] = str(os.getpid())  # ranks may share a GPU: to NCCL each is on a machine of its own
inner = Model().to(DEVICE)
model = wrapped(inner)
optimizer = OPTIMIZERS[OPTIONS.get("optimizer", "AdamW")](model.parameters())
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
# Its scale changes every third step, and once it is too large a step is left out.
scaler = torch.amp.GradScaler(DEVICE, growth_interval=3, enabled=KIND in ("ddp", "compiled"))
state = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler, "rng": mlflash.rng()}
entries = 0


def batches(first: int) -> Iterator[torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    order = [[(step * size + rank) * BATCH + n for n in range(BATCH)] for step in range(first, LAST + 1)]
    # Of its own: otherwise each iterator takes a number of the generator that the state has.
    seeds = torch.Generator().manual_seed(0)
    yield from DataLoader(Numbers(), batch_sampler=order, generator=seeds)


def train(ckpt: mlflash.Checkpointer, start: int) -> int:
    global entries
    entries += 1
    faulthandler.cancel_dump_traceback_later()
    rank = dist.get_rank()
    if start == 0:
        torch.manual_seed(100 + rank)
    if OPTIONS.get("digests") == "entries":
        note_digest(rank, start)
    data = batches(start + 1)
    for step in range(start + 1, LAST + 1):
        if OPTIONS.get("stops") and (OUT / "stop").exists() and step > int((OUT / "stop").read_text()):
            break
        if rank == 0 and step == OPTIONS.get("hold_at"):
            until((OUT / "go on").exists, "the test to say go on")
        if rank == 0 and step in OPTIONS.get("holds", ()):
            until((OUT / f"go on {step}").exists, f"the test to say go on with step {step}")
        inner.step = step
        die(step, "fetch")
        x = next(data).to(DEVICE)
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        die(step, "optimizer")
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        die(step, "save")
        saved = ckpt.save(step, state, until=optimizer if OPTIONS.get("until") else None)
        if OPTIONS.get("waits"):
            saved.wait()
        with (OUT / f"steps-{rank}").open("a") as file:
            file.write(f"{time.time():.4f} {step} {os.getpid()} {entries} {os.uname().nodename}\n")
        if OPTIONS.get("digests") == "steps":
            note_digest(rank, step)
        take(OPTIONS.get("pause", 0.0))
    return rank


def digest_now() -> str:
    generators = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if DEVICE == "cuda" else [])]
    return digest([model, optimizer, schedule, scaler, generators])


def note_digest(rank: int, step: int) -> None:
    with (OUT / f"digests-{rank}").open("a") as file:
        file.write(f"{step} {os.getpid()} {digest_now()}\n")


def die_in(point: str) -> None:
    rank = os.environ.get("RANK", "")
    if entries or WAITED:
        die_if_told(rank, point)
    for victim, where in OPTIONS.get("die_in", []):
        if where == point and rank == str(victim) and (entries or WAITED):
            once(OUT / f"died-{rank}-{point}")


def main() -> None:
    if "die_in" in OPTIONS or OPTIONS.get("attacked"):
        crash_points.arm(die_in)
        link = decider()
        assert link is not None
        link.on_lost.append(lambda number: faulthandler.dump_traceback_later(LATE_S))  # who does not leave says where
    if KIND == "compiled":  # so that who waits has compiled it
        model(torch.ones(BATCH, WIDTH, device=DEVICE)).sum().backward()
        optimizer.zero_grad()
    (OUT / f"waits-{os.uname().nodename}-{os.getpid()}").touch()
    rank = mlflash.keep_alive(train, state, OPTIONS.get("directory"), **OPTIONS.get("settings", {}))
    left = {kind: len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")}
    said = {"digest": digest_now(), "pid": os.getpid(), "entries": entries, "node": os.uname().nodename, **left}
    (OUT / f"end-{rank}").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
