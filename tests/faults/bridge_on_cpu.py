"""A real Megatron Bridge on CPUs: its `pretrain`, train step and checkpoints, with a small GPT of its own provider.

Left out is what that does not use: Hugging Face's models and data sets, PEFT, ModelOpt, OmegaConf, MIMO, and NVRx. It
asks for Python 3.12, and does not need it. Import this before anything of Megatron.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import megatron_on_cpu
from left_out import found_in, leave_init_out, leave_out

_B = "megatron.bridge"
(_ROOT,) = importlib.util.find_spec(_B).submodule_search_locations  # type: ignore[union-attr,misc]
leave_init_out(Path(_ROOT).parent, _B, f"{_B}.data", f"{_B}.models", f"{_B}.peft")
leave_out(f"{_B}.data.builders", f"{_B}.data.builders.direct_hf_sft", f"{_B}.data.builders.energon",
          f"{_B}.data.builders.gpt_sft", f"{_B}.data.builders.mock_vlm_sft", f"{_B}.data.sources",
          f"{_B}.data.sources.hf", f"{_B}.data.packing.algorithms", f"{_B}.data.megatron_mimo",
          f"{_B}.data.megatron_mimo.base_provider", f"{_B}.models.megatron_mimo",
          f"{_B}.models.megatron_mimo.megatron_mimo_provider", f"{_B}.peft.lora", f"{_B}.peft.lora_layers",
          "modelopt", "modelopt.torch", "modelopt.torch.distill", "modelopt.torch.distill.plugins",
          "modelopt.torch.distill.plugins.megatron", "modelopt.torch.opt", "modelopt.torch.opt.plugins",
          "nvidia_resiliency_ext", "nvidia_resiliency_ext.inprocess", "omegaconf", "transformers")  # fmt: skip
found_in(f"{_B}.models", [("GPTModelProvider", f"{_B}.models.gpt_provider")])
from megatron.bridge.data.base import DatasetProvider  # noqa: E402
from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec  # noqa: E402
from megatron.bridge.training import config, initialize, setup  # noqa: E402
from megatron.bridge.training.callbacks import Callback  # noqa: E402
from megatron.bridge.training.gpt_step import forward_step  # noqa: E402
from megatron.bridge.training.pretrain import pretrain  # noqa: E402
from megatron.bridge.training.tokenizers.config import TokenizerConfig  # noqa: E402

del sys.modules["transformers"]  # of which PyTorch would take it that it is installed


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Let Bridge and Megatron run here without CUDA."""
    seed, begin = initialize._set_random_seed, setup.initialize_megatron

    def seeded(number: int, *args: Any, **named: Any) -> None:
        seed(number, *args, **named)
        megatron_on_cpu.tensor_parallel.model_parallel_cuda_manual_seed(number)

    with (
        megatron_on_cpu.on_cpu(),
        mock.patch.object(initialize, "_set_random_seed", seeded),
        mock.patch.object(initialize, "compile_helpers", lambda: None),
        mock.patch.object(setup, "initialize_megatron", lambda **named: begin(**named, allow_no_cuda=True)),
        mock.patch.object(setup, "set_jit_fusion_options", lambda *args: None),
    ):
        yield


__all__ = ["Callback", "DatasetProvider", "GPTModelProvider", "TokenizerConfig", "config", "forward_step",
           "local_layer_spec", "on_cpu", "pretrain"]  # fmt: skip
