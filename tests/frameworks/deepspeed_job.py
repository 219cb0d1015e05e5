"""A small model that DeepSpeed trains: ZeRO 0 to 3; one or two batches to a step; in float32, bfloat16 or float16."""

from __future__ import annotations

import gc
import os
from typing import Any

import torch
from job import Run

from mlflash import rng

os.environ.setdefault("DS_ACCELERATOR", "cpu")
# What DeepSpeed compiles stays as it is: else each process would import the compiler, for seconds.
torch.compile = lambda function=None, **options: function or (lambda other: other)  # type: ignore[assignment]
import deepspeed  # noqa: E402
import torch._dynamo  # noqa: E402  # the first optimizer does it

from mlflash.adapters.deepspeed import attach  # noqa: E402

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or each machine would compile it first
# Whether a processor has instructions for it; torch computes in float16 on any.
deepspeed.get_accelerator().is_fp16_supported = lambda: True
gc.freeze()  # an engine of ZeRO-3 has garbage collected: among all that was imported, that takes half a second
VARIANTS = {
    **{f"zero{stage}": {"stage": stage} for stage in range(4)},
    "accumulate": {"stage": 2, "batches": 2},
    "bf16": {"stage": 1, "bf16": {"enabled": True}},
    "fp16": {"stage": 2, "fp16": {"enabled": True, "initial_scale_power": 4}},
}


def engine_of(stage: int = 1, batches: int = 1, **config: Any) -> Any:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 2048), torch.nn.Dropout(0.1), torch.nn.Linear(2048, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": batches,
              "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True, **config}  # fmt: skip
    engine = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]
    torch.manual_seed(100 + torch.distributed.get_rank())
    return engine


def batch_of(engine: Any, number: int) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(1000 * number + torch.distributed.get_rank())
    return torch.randn(2, 16, generator=numbers).to(next(engine.module.parameters()).dtype)


def step(engine: Any, seen: int) -> float:
    loss = (engine(batch_of(engine, seen)).float() ** 2).mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def train(run: Run) -> None:
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    engine = engine_of(**VARIANTS[run.variant])
    each = {"storage_every": 1} if run.trigger == "storage_every" else {}
    with attach(engine, run.interval, run.skip, enabled=run.enabled, **each, **run.checkpointing) as flash:
        run.checkpointer = lambda: flash.checkpointer
        _, client_state = engine.load_checkpoint(run.directory)
        seen = client_state["seen"] if client_state else 0
        if client_state and "numbers" in client_state:  # on disk DeepSpeed keeps what rank 0 has
            rng().load_state_dict(client_state["numbers"][rank])
        while engine.global_steps < run.last:
            number = engine.global_steps + 1
            run.loss(number, step(engine, seen))
            seen += 1
            if not run.follows:
                flash.save_if_needed({"seen": seen})
            if run.disk and engine.global_steps == number and number % run.disk == 0:
                numbers: list[Any] = [None] * size
                torch.distributed.all_gather_object(numbers, rng().state_dict())
                engine.save_checkpoint(run.directory, client_state={"seen": seen, "numbers": numbers})
    run.end(engine.module, [engine.optimizer])
    engine.destroy()
