"""ML Flashpoint's low-level recipe, in the order of its guide, with PyTorch's DCP or Megatron.

    flashpoint_job.py FORM LONG_TERM LAST [DIE]

FORM: "dcp" or "megatron". LONG_TERM: where the regular checkpoint is; a first start leaves one there. Each rank notes
from where it has recovered and with which bits, and with which it has ended, beside those of a training that nothing
happened to. DIE: all ranks are killed when this step was saved.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from digests import digest
from records import note
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard

from mlflash import Checkpointer
from mlflash.adapters.dcp import MemoryReader, MemoryWriter, latest
from mlflash.adapters.distributed import init_process_group

BASE = "/tmp/mlf-jobs/job-145"  # a name


class Training:
    """A small model, sharded by FSDP2, in training."""

    def __init__(self, seed: int):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.objects = [self.model, self.optimizer]
        self.step = 0

    def train(self, last: int) -> None:
        while self.step < last:
            self.step += 1
            numbers = torch.Generator().manual_seed(100 * self.step + dist.get_rank())
            self.model(torch.randn(3, 8, generator=numbers)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]


def with_dcp(long_term: Path, is_new: bool, last: int, die: int) -> None:
    """The section "PyTorch DCP"."""
    training = Training(seed=1)
    if is_new:
        dcp.save(training.state_dict(), checkpoint_id=str(long_term))
        training = Training(seed=2)
    # Initialization
    checkpointer = Checkpointer(BASE, redundancy="copy", timeout_s=60)
    memory_storage_writer = MemoryWriter(checkpointer)
    memory_storage_reader = MemoryReader(checkpointer)
    # Recovery
    state_dict = training.state_dict()
    latest_saved_checkpoint_id = latest(checkpointer, instead=long_term)
    if latest_saved_checkpoint_id:
        dcp.load(state_dict, checkpoint_id=str(latest_saved_checkpoint_id), storage_reader=memory_storage_reader)
    else:
        dcp.load(state_dict, checkpoint_id=str(long_term))
    training.load(state_dict)
    note(
        "recovered",
        step=training.step,
        memory=bool(latest_saved_checkpoint_id),
        digest=digest(training.objects),
    )
    # Saving
    while training.step < last:
        training.train(training.step + 1)
        state_dict = training.state_dict()
        curr_step_checkpoint_id = f"{BASE}/step-{training.step}_ckpt"
        if training.step % 2:
            metadata = dcp.save(
                state_dict, checkpoint_id=str(curr_step_checkpoint_id), storage_writer=memory_storage_writer
            )
            assert metadata.state_dict_metadata
        else:
            future = dcp.async_save(
                state_dict,
                checkpoint_id=str(curr_step_checkpoint_id),
                storage_writer=memory_storage_writer,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            )
            future.result()
        if training.step == die:
            note("saved", step=training.step, digest=digest(training.objects))
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.close()
    whole = Training(seed=1)
    whole.load(whole.state_dict())  # PyTorch gives an optimizer without state one that counts a step
    whole.train(last)
    note("ended", digest=digest(training.objects), whole=digest(whole.objects))


def with_megatron(long_term: Path, is_new: bool, last: int, die: int) -> None:
    """The section "Megatron-LM"."""
    from megatron_on_cpu import Training, on_cpu  # isort: split
    from megatron.core import dist_checkpointing as mcore_dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import common

    from mlflash.adapters.megatron import LoadShards, SaveShards

    has_it = hasattr(common, "TorchCommonLoadStrategy")  # up to Core 0.16: later ones refuse the line
    of_the_page = {"common_strategy": common.TorchCommonLoadStrategy()} if has_it else {}
    with on_cpu():
        training = Training()
        if is_new:
            if dist.get_rank() == 0:
                long_term.mkdir()
            dist.barrier()
            training.train(1)
            mcore_dist_checkpointing.save(training.sharded_state(), str(long_term))
            training = Training()
        # Save strategy, load strategy
        checkpointer = Checkpointer(BASE, redundancy="copy", timeout_s=60)
        megatron_save_strategy = SaveShards(checkpointer)
        mlflash_load_strategy = LoadShards(checkpointer)
        latest_saved_checkpoint = mlflash_load_strategy.directory(instead=long_term)
        if latest_saved_checkpoint:
            state_dict = mcore_dist_checkpointing.load(
                sharded_state_dict=training.sharded_state(True),
                checkpoint_dir=str(latest_saved_checkpoint),
                sharded_strategy=mlflash_load_strategy,
                **of_the_page,
            )
        else:
            state_dict = mcore_dist_checkpointing.load(
                sharded_state_dict=training.sharded_state(True), checkpoint_dir=str(long_term), **of_the_page
            )
        training.load(state_dict)
        note(
            "recovered", step=training.step, memory=bool(latest_saved_checkpoint), digest=digest(training.model.module)
        )
        while training.step < last:
            training.train(training.step + 1)
            request = mcore_dist_checkpointing.save(
                sharded_state_dict=training.sharded_state(),
                checkpoint_dir=megatron_save_strategy.directory(training.step),
                sharded_strategy=megatron_save_strategy,
                async_sharded_save=True,
            )
            request.execute_sync()
            if training.step == die:
                note("saved", step=training.step, digest=digest(training.model.module))
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
        checkpointer.close()
        whole = Training()
        whole.train(last)
        note("ended", digest=digest(training.model.module), whole=digest(whole.model.module))


if __name__ == "__main__":
    init_process_group(host="127.0.0.1")
    form = {"dcp": with_dcp, "megatron": with_megatron}[sys.argv[1]]
    is_new = not os.path.exists(sys.argv[2])
    dist.barrier()
    form(Path(sys.argv[2]), is_new, int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 0)
    dist.destroy_process_group()
