"""Megatron's pretrain trains a GPT as in the tests, which pretend to have CUDA, and saves in each compared way."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rounds import ASYNC, DCP, ITSELF, OURS, Rounds, Way, dcp_way

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
import megatron_on_cpu  # noqa: F401, without it Megatron needs Triton

from mlflash.adapters.distributed import init_process_group
from mlflash.adapters.megatron import easy, persistent

WIDTH = 512


def measure(rounds: Rounds, iteration: int, model: Any, optimizer: Any, scheduler: Any) -> None:
    """Time all ways in which Megatron can save its state."""
    from megatron.training import async_utils, get_args

    args = get_args()
    easy.initialize_easyckpt(1000, 1, 0, in_background=True, job="own-files", comm=rounds.comm)
    running = easy._running
    assert running is not None and running.files is not None

    def save(folder: Path, asynchronous: bool = False) -> None:
        args.save, args.async_save = str(folder), asynchronous
        persistent.save(iteration, model, optimizer, scheduler)

    def in_background(folder: Path) -> None:
        args.save = str(folder)
        easy.save_to_directory(iteration, running, functools.partial(save, folder))

    def state() -> dict[str, Any]:
        own = {name: value for name, value in model[0].state_dict().items() if value is not None}
        return {"model": own, f"optimizer {rounds.comm.rank}": optimizer.state_dict()}

    rounds.measure("Megatron's pretrain, torch_dist", {
        ITSELF: Way(save),
        OURS: Way(in_background, running.files.finish),
        ASYNC: Way(lambda folder: save(folder, True),
                            lambda: async_utils.maybe_finalize_async_save(blocking=True)),
        DCP: dcp_way(state),
    })  # fmt: skip
    args.async_save = False
    easy.close()
    easy.initialize_easyckpt(1, 0, 0, job="in-memory", comm=rounds.comm, directory=None)


def train(rounds: Rounds) -> None:
    os.environ["OUT"] = rounds.memory  # the training of the tests writes its notes there
    from megatron_pretrain import pretrain

    init_process_group(comm=rounds.comm)
    from megatron.training import training

    def save_and_decide(model: Any, optimizer: Any, scheduler: Any, iteration: int, *args: Any) -> bool:
        if iteration == 1:
            measure(rounds, iteration, model, optimizer, scheduler)
        else:
            easy.save_checkpoint_if_needed(iteration, model, optimizer, scheduler)
            assert easy._running is not None
            rounds.after_save(easy._running.checkpointer)
        if iteration < rounds.steps:
            return False
        rounds.show_in_memory("Megatron, EasyCkpt's calls")
        easy.close()
        return True

    training.checkpoint_and_decide_exit = save_and_decide
    layers = max(1, rounds.parameters // (12 * WIDTH**2))
    pretrain(["--hidden-size", str(WIDTH), "--num-layers", str(layers), "--save", rounds.memory, "--exit-interval",
              str(rounds.steps), "--async-strategy", "mcore"], lambda step, loss, norm: None)  # fmt: skip
    dist.destroy_process_group()
