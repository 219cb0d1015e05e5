"""A real NeMo on CPUs: `nemo.lightning` trains a small GPT of a real Megatron Core; only the device is pretended.

Left out is `nemo.collections.llm`, which wants the packages of all of NeMo's collections: its recipes, and ModelOpt. So
are NeMo-Run and NVRx.
Import this before anything of NeMo; as a program it runs another one so.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import fiddle as fdl
import torch
from megatron_on_cpu import on_cpu as megatron_on_cpu
from random_texts import Texts, text_of

_LLM = "nemo.collections.llm"


def _leave_out(name: str, *functions: str) -> None:
    """Let a module of NeMo be one whose functions do nothing, and what is above it empty."""
    module = types.ModuleType(name)
    for function in functions:
        setattr(module, function, lambda *args, **kwargs: None)
    sys.modules[name] = module
    above = name.rpartition(".")[0]
    if above != "nemo.collections" and above not in sys.modules:
        _leave_out(above)


# Of ModelOpt; `MegatronStrategy` asks them at each step, each save and each load.
_leave_out(f"{_LLM}.modelopt.model_utils", "save_modelopt_state", "restore_modelopt_state")
_leave_out(f"{_LLM}.modelopt.distill.utils", "get_tensor_shapes_adjust_fn_for_distillation")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
    from megatron.core import tensor_parallel
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig
    from nemo import lightning as nl
    from nemo.lightning import io, nemo_logger
    from nemo.lightning.callback_group import CallbackGroup
    from nemo.lightning.data import WrappedDataLoader
    from nemo.lightning.io import pl as io_pl
    from nemo.lightning.megatron_parallel import MaskedTokenLossReduction
    from nemo.lightning.pytorch.optim import CosineAnnealingScheduler, MegatronOptimizerModule
    from nemo.lightning.pytorch.plugins.data_sampler import MegatronDataSampler


class _Serializer:
    """In the place of NeMo-Run's, which writes a context once more for people to read."""

    def serialize(self, config: Any) -> str:
        return f"# {type(config).__name__}"


for name, things in (("config", {"Config": fdl.Config, "Partial": fdl.Partial}),
                     ("core.serialization.yaml", {"YamlSerializer": _Serializer})):  # fmt: skip
    sys.modules[f"nemo_run.{name}"] = types.ModuleType(name)
    vars(sys.modules[f"nemo_run.{name}"]).update(things)
nemo_logger.lcp = types.SimpleNamespace(LocalCheckpointCallback=types.SimpleNamespace)  # NVRx's, for isinstance
CallbackGroup.get_instance()._callbacks.clear()  # telemetry, which NeMo's recipes configure
VOCABULARY, LENGTH = 128, 16
MASK = torch.ones(LENGTH, LENGTH).tril().logical_not()[None, None]


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    from torch.distributed import DeviceMesh

    from_group = DeviceMesh.from_group
    with (
        megatron_on_cpu(),
        mock.patch.object(io_pl, "_fix_tensors_device", lambda checkpoint: checkpoint),
        mock.patch.object(DeviceMesh, "from_group", lambda group, device, *args: from_group(group, "cpu", *args)),
    ):
        yield


class Text(Texts):
    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        words = text_of(1000 + number, LENGTH + 1, VOCABULARY)
        return {"tokens": words[:-1], "labels": words[1:], "loss_mask": torch.ones(LENGTH),
                "position_ids": torch.arange(LENGTH), "attention_mask": MASK[0]}  # fmt: skip


class Data(pl.LightningDataModule, io.IOMixin):
    """The data module, as those of NeMo's recipes are: it counts samples.

    Args:
        kind: of the sampler: "single" once through the data; "cyclic" again and again, in random order.
        samples: two of them make a step.
    """

    def __init__(self, kind: str = "single", samples: int = 16):
        super().__init__()
        self.samples = samples
        self.data_sampler = MegatronDataSampler(LENGTH, micro_batch_size=1, global_batch_size=2, dataloader_type=kind)
        self.init_global_step = 0

    def train_dataloader(self) -> Any:
        self.init_global_step = self.data_sampler.init_global_step = self.trainer.global_step
        return WrappedDataLoader(mode="train", dataset=Text(self.samples), num_workers=0)

    def state_dict(self) -> dict[str, Any]:
        steps = self.trainer.global_step - self.init_global_step
        return {"consumed_samples": self.data_sampler.compute_consumed_samples(steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data_sampler.init_consumed_samples = self.data_sampler.prev_consumed_samples = state["consumed_samples"]
        self.data_sampler.if_first_step = 1


class Schedule(CosineAnnealingScheduler):
    """A schedule that is the same however many steps are trained; NeMo tells it the trainer's."""

    max_steps = property(lambda self: 20, lambda self, steps: None)


class Model(pl.LightningModule, io.IOMixin):
    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        optimizer = OptimizerConfig(lr=1e-2, clip_grad=0.0, use_distributed_optimizer=True, bf16=False)
        schedule = Schedule(warmup_steps=2, constant_steps=0, min_lr=1e-3)
        self.optim = MegatronOptimizerModule(optimizer, schedule)
        self.optim.connect(self)

    def configure_model(self) -> None:
        tensor_parallel.get_cuda_rng_tracker().reset()
        tensor_parallel.model_parallel_cuda_manual_seed(7)
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.module = GPTModel(self.config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY,
                                   max_sequence_length=LENGTH, parallel_output=True)  # fmt: skip

    def data_step(self, batches: Any) -> Any:
        return next(batches)[0]

    def forward(self, batch: Any) -> Any:
        return self.module(batch["tokens"], batch["position_ids"], MASK, labels=batch["labels"])

    def training_step(self, batch: Any, number: Any = None) -> Any:
        return self(batch)

    def validation_step(self, batch: Any, number: Any = None) -> Any:
        return self(batch)

    @property
    def training_loss_reduction(self) -> Any:
        return MaskedTokenLossReduction()

    validation_loss_reduction = training_loss_reduction


def config(tensor: int = 1) -> TransformerConfig:
    return TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True,
                             tensor_model_parallel_size=tensor, attention_dropout=0.1, hidden_dropout=0.1,
                             bias_dropout_fusion=False, masked_softmax_fusion=False,
                             gradient_accumulation_fusion=False)  # fmt: skip


def strategy(tensor: int = 1, **more: Any) -> nl.MegatronStrategy:
    """Megatron's distributed optimizer, for a model of its own DDP."""
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=False,
                                        grad_reduce_in_fp32=True)  # fmt: skip
    return nl.MegatronStrategy(tensor_model_parallel_size=tensor, ddp=ddp, replace_progress_bar=False,
                               **{"ckpt_async_save": False, **more})  # fmt: skip


__all__ = ["Data", "Model", "config", "nl", "on_cpu", "pl", "strategy"]

if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = os.path.dirname(sys.argv[0])
    with on_cpu():
        runpy.run_path(sys.argv[0], run_name="__main__")
