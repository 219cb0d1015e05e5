"""DeepSpeed trains some layers, and after the first step saves in each compared way."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
import torch.distributed as dist
from rounds import DCP, ITSELF, OURS, Rounds, Way, dcp_way

torch.compile = lambda function=None, **options: function or (lambda other: other)  # type: ignore[assignment]
import deepspeed

from mlflash.adapters.deepspeed import attach
from mlflash.adapters.distributed import init_process_group

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise it would be compiled
WIDTH, BATCH = 1024, 64
CASE = "DeepSpeed, ZeRO-1"


def train(rounds: Rounds) -> None:
    init_process_group(comm=rounds.comm)
    layers = max(1, rounds.parameters // (WIDTH * WIDTH))
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1},
              "zero_allow_untested_optimizer": True}  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
    engine.step()
    with attach(engine, 1000, in_background=True, job="own-files", comm=rounds.comm) as flash:

        def by_itself(folder: Path) -> None:
            type(engine).save_checkpoint(engine, str(folder), tag="saved")

        def state() -> dict[str, Any]:
            return {"model": model.state_dict(), f"optimizer {rounds.comm.rank}": engine.optimizer.state_dict()}

        rounds.measure(CASE, {
            ITSELF: Way(by_itself),
            OURS: Way(lambda folder: engine.save_checkpoint(str(folder), tag="saved"), flash._files.finish),
            DCP: dcp_way(state),
        })  # fmt: skip
        for _ in range(rounds.steps - 1):
            engine.backward(engine(torch.ones(BATCH, WIDTH)).square().mean())
            engine.step()
            flash.save()
            rounds.after_save(flash.checkpointer)
    rounds.show_in_memory(CASE)
    dist.destroy_process_group()
