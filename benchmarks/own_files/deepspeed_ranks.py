"""The program of each rank: DeepSpeed trains some layers, and after the first step saves in each compared way."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from rounds import COMM, DCP, ITSELF, OURS, Rounds, Way, dcp_way  # noqa: E402

torch.compile = lambda function=None, **options: function or (lambda other: other)  # type: ignore[assignment]
import deepspeed  # noqa: E402

from mlflash.adapters.deepspeed import attach  # noqa: E402
from mlflash.adapters.distributed import init_process_group  # noqa: E402

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise it would be compiled
WIDTH, BATCH = 1024, 64


def main() -> None:
    rounds = Rounds()
    init_process_group(comm=COMM)
    layers = max(1, rounds.parameters // (WIDTH * WIDTH))
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1},
              "zero_allow_untested_optimizer": True}  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
    engine.step()
    with attach(engine, 1000, in_background=True, job="own-files", comm=COMM, memory=rounds.memory) as flash:

        def by_itself(folder: Path) -> None:
            type(engine).save_checkpoint(engine, str(folder), tag="saved")

        def state() -> dict[str, Any]:
            return {"model": model.state_dict(), f"optimizer {COMM.rank}": engine.optimizer.state_dict()}

        rounds.measure("DeepSpeed, ZeRO-1", {
            ITSELF: Way(by_itself),
            OURS: Way(lambda folder: engine.save_checkpoint(str(folder), tag="saved"), flash._files.finish),
            DCP: dcp_way(state),
        })  # fmt: skip
        for _ in range(rounds.steps - 1):
            engine.backward(engine(torch.ones(BATCH, WIDTH)).square().mean())
            engine.step()
            rounds.in_memory(flash.checkpointer, flash.save)
        rounds.show_in_memory("DeepSpeed, ZeRO-1")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
