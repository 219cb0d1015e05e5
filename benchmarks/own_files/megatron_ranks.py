"""The program of each rank: Megatron's pretrain trains a GPT and then saves in each compared way.

The training is that of the tests, which pretend to have CUDA. Megatron starts processes that import this file. These
processes must not start MPI.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
os.environ["OUT"] = sys.argv[2]  # the training of the tests writes its notes there

import torch.distributed as dist  # noqa: E402
from megatron_pretrain import pretrain  # noqa: E402

from mlflash.adapters.distributed import init_process_group  # noqa: E402

WIDTH = 512
ASYNC = "--async-save"


def in_memory(asked: Any, iteration: int, model: Any, optimizer: Any, scheduler: Any) -> None:
    """Time a save in memory."""
    from rounds import COMM

    from mlflash.adapters.megatron import easy

    if easy._running is None:
        easy.initialize_easyckpt(1, 0, 0, job="in-memory", comm=COMM, memory=asked.memory, directory=None)
    assert easy._running is not None
    save = functools.partial(easy.save_checkpoint_if_needed, iteration, model, optimizer, scheduler)
    asked.in_memory(easy._running.checkpointer, save)


def measure(asked: Any, iteration: int, model: Any, optimizer: Any, scheduler: Any) -> None:
    """Time all ways in which Megatron can save its state."""
    from megatron.training import async_utils, get_args
    from rounds import COMM, DCP, ITSELF, OURS, Way, dcp_way

    from mlflash.adapters.megatron import easy, persistent

    args = get_args()
    easy.initialize_easyckpt(1000, 1, 0, in_background=True, job="own-files", comm=COMM, memory=asked.memory)
    assert easy._running is not None and easy._running.files is not None
    files = easy._running.files

    def save(folder: Path, asynchronous: bool = False) -> None:
        args.save, args.async_save = str(folder), asynchronous
        persistent.save(iteration, model, optimizer, scheduler)

    def in_background(folder: Path) -> None:
        files._directory = str(folder)
        files.save(iteration, functools.partial(save, folder))

    def state() -> dict[str, Any]:
        own = {name: value for name, value in model[0].state_dict().items() if value is not None}
        return {"model": own, f"optimizer {COMM.rank}": optimizer.state_dict()}

    asked.measure("Megatron's pretrain, torch_dist", {
        ITSELF: Way(save),
        OURS: Way(in_background, files.finish),
        ASYNC: Way(lambda folder: save(folder, True), lambda: async_utils.maybe_finalize_async_save(blocking=True)),
        DCP: dcp_way(state),
    })  # fmt: skip
    args.async_save = False
    easy.close()


def main() -> None:
    from rounds import COMM, Rounds

    asked = Rounds()
    init_process_group(comm=COMM)
    from megatron.training import training

    from mlflash.adapters.megatron import easy

    def save_and_decide(model: Any, optimizer: Any, scheduler: Any, iteration: int, *args: Any) -> bool:
        (measure if iteration == 1 else in_memory)(asked, iteration, model, optimizer, scheduler)
        if iteration < asked.steps:
            return False
        asked.show_in_memory("Megatron, EasyCkpt's calls")
        easy.close()
        return True

    training.checkpoint_and_decide_exit = save_and_decide
    layers = max(1, asked.parameters // (12 * WIDTH**2))
    pretrain(["--hidden-size", str(WIDTH), "--num-layers", str(layers), "--save", str(asked.memory), "--exit-interval",
              str(asked.steps), "--async-strategy", "mcore"])  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
