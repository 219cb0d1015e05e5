"""A real TorchTitan on CPUs: what it takes for granted of an accelerator, and a small Llama in training.

Only the device is pretended: Trainer, model, FSDP2, optimizer, schedulers, data loader and checkpointer are
TorchTitan's own, over gloo. Import this before anything of TorchTitan; as a program it runs another one so.
"""

from __future__ import annotations

import dataclasses
import os
import runpy
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._utils
from left_out import leave_out
from torch.distributed import distributed_c10d
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils.data import IterableDataset


def _sums(group: FSDPParamGroup, *args: Any, _make: Any = FSDPParamGroup.__init__, **more: Any) -> None:
    """Make a group of FSDP2 that sums gradients: gloo knows no sum of scaled ones."""
    _make(group, *args, **more)
    group.force_sum_reduction_for_comms = True


def _attend(query: Any, key: Any, value: Any, scale: float | None, enable_gqa: bool, **more: Any) -> tuple[Any, Any]:
    """FlexAttention has no way back on CPUs; of sequences of one document each this is the same."""
    found = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=enable_gqa
    )
    return found, types.SimpleNamespace(lse=None)


# What TorchTitan asks of `torch.cuda`; `torch.cpu` does not have all of it.
_DEVICE = types.SimpleNamespace(**{
    **vars(torch.cpu), "current_device": lambda: 0, "get_device_name": lambda device: "CPU",
    "get_device_properties": lambda device: types.SimpleNamespace(total_memory=1 << 30),
    "memory_stats": lambda device: {}, "reset_peak_memory_stats": lambda: None, "empty_cache": lambda: None,
})  # fmt: skip
# Nothing tested here calls these: they need a GPU, or take seconds to import, or a gigabyte.
leave_out("datasets", "datasets.distributed", "torch.utils.tensorboard",
          "torchtitan.distributed.minimal_async_ep.kernels")  # fmt: skip
# What TorchTitan compiles stays as it is: else each process would import the compiler, for a second or two.
torch.compile = lambda function=None, **options: function or (lambda other: other)  # type: ignore[assignment]
FSDPParamGroup.__init__ = _sums  # type: ignore[method-assign]
torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = lambda kind: _DEVICE
if not hasattr(torch.distributed, "set_timeout"):  # TorchTitan is made for a PyTorch after 2.13
    torch.distributed.set_timeout = distributed_c10d._set_pg_timeout
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torchtitan.trainer
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.config.configs import DebugConfig
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer

# At the end of a training its rank 0 sleeps for two seconds.
torchtitan.trainer.time = types.SimpleNamespace(sleep=lambda seconds: None, perf_counter=time.perf_counter)
torchtitan.trainer.wrap_with_cuda_graph = lambda step: step
torchtitan.trainer.cudagraph_teardown = lambda: None
FlexAttention._compiled_flex_attn = staticmethod(_attend)
VOCABULARY, LENGTH = 2048, 16


class Tokens(IterableDataset):
    """Sequences of tokens, the same for a data-parallel rank each time, or drawn from the global random numbers."""

    def __init__(self, rank: int, draws: bool):
        self.rank, self.draws, self.at = rank, draws, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            numbers = None if self.draws else torch.Generator().manual_seed(1000 * self.rank + self.at)
            tokens = torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=numbers)
            self.at += 1
            yield {"input": tokens[:-1], "positions": torch.arange(LENGTH)}, tokens[1:]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Data(ParallelAwareDataloader):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        draws: bool = False

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int,
                 snapshot_every_n_steps: int | None = None, **more: Any):  # fmt: skip
        super().__init__(
            Tokens(dp_rank, config.draws), dp_rank=dp_rank, dp_world_size=dp_world_size, batch_size=local_batch_size,
            snapshot_every_n_steps=snapshot_every_n_steps or 1, num_workers=config.num_workers,
        )  # fmt: skip


class NoTokenizer(BaseTokenizer):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **more: Any):
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


def config(folder: str, checkpoint: Any, steps: int = 100, **data: Any) -> Trainer.Config:
    """The debug model of TorchTitan's Llama 3, with one layer, on CPUs; its schedule is for so many steps."""
    spec = model_registry("debugmodel")
    del spec.model.layers[1:]
    return Trainer.Config(
        model_spec=spec, dump_folder=folder, loss=CrossEntropyLoss.Config(), tokenizer=NoTokenizer.Config(),
        dataloader=Data.Config(**data), optimizer=default_adamw(lr=1e-2),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=3), checkpoint=checkpoint,
        training=TrainingConfig(local_batch_size=2, seq_len=LENGTH, steps=steps),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"), activation_checkpoint=None,
        debug=DebugConfig(seed=1), metrics=MetricsProcessor.Config(log_freq=1000),
    )  # fmt: skip


class Training(Trainer):
    """TorchTitan's Trainer, which ends after `last` as if it had been stopped there, and says each step's loss."""

    def __init__(self, config: Trainer.Config, last: int, say: Callable[[int, float], None]):
        super().__init__(config)
        self._last, self._say = last, say

    def should_continue_training(self) -> bool:
        return self.step < self._last

    def forward_backward_step(self, **inputs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().forward_backward_step(**inputs)
        self._say(self.step, loss.item())
        return loss


if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
