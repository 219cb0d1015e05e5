"""A recipe of NeMo, made small, trained by `llm.pretrain`: stock, with memory, and with NeMo's files behind training.

`nemo_recipe.py` calls it, so that processes which PyTorch starts import nothing of NeMo.

`llm.pretrain`, `pretrain_recipe` and a model of NeMo's are as they are. Left out are NeMo-Run (Fiddle's configurations,
of which its own are made, are in its place), and what a pretraining does not use: fine-tuning, PEFT, ModelOpt, exports,
and tokenizers. So none of the packages that these want is needed.
"""

from __future__ import annotations

import os
import signal
import sys
import types
from pathlib import Path
from typing import Any

import fiddle as fdl
import torch
from left_out import leave_init_out, leave_out, put
from nemo_on_cpu import Data, on_cpu, pl
from records import note

# isort: split
import nemo
from megatron.core import tensor_parallel

_IN = "nemo.collections"


def _as_it_is(function: Any = None, **kwargs: Any) -> Any:
    """In the place of NeMo-Run's decorators, which let its command line know of a function."""
    return function or (lambda function: function)


leave_init_out(Path(nemo.__file__).parent, f"{_IN}.llm", f"{_IN}.llm.gpt", f"{_IN}.llm.gpt.data",
               f"{_IN}.llm.gpt.model", f"{_IN}.llm.recipes", f"{_IN}.common")  # fmt: skip
leave_out(f"{_IN}.llm.gpt.data.fine_tuning", f"{_IN}.llm.gpt.data.packed_sequence", f"{_IN}.llm.peft",
          f"{_IN}.llm.modelopt", f"{_IN}.llm.modelopt.model_utils", f"{_IN}.llm.recipes.finetune_default",
          f"{_IN}.common.tokenizers", "nemo.export.trt_llm.nemo_ckpt_loader.nemo_file")  # fmt: skip
_run: Any = put("nemo_run", types.ModuleType("nemo_run"))
_run.Config, _run.Partial, _run.autoconvert = fdl.Config, fdl.Partial, _as_it_is
_run.cli = types.SimpleNamespace(factory=_as_it_is, entrypoint=_as_it_is)
from nemo.collections.llm import api as llm  # noqa: E402
from nemo.collections.llm.recipes import llama32_1b  # noqa: E402

SMALL = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "num_query_groups": 2,
         "seq_length": 16, "vocab_size": 128, "hidden_dropout": 0.1, "use_cpu_initialization": True,
         "masked_softmax_fusion": False, "bias_activation_fusion": False, "bias_dropout_fusion": False,
         "apply_rope_fusion": False, "persist_layer_norm": False, "cross_entropy_loss_fusion": False}  # fmt: skip


class Tokens:
    """As much of a tokenizer as a pretraining asks for."""

    vocab_size = 128


class Words(Data):
    """Random words, in the place of the recipe's, which begins with the first again when a training goes on."""

    def __init__(self, seq_length: int, global_batch_size: int, micro_batch_size: int):
        super().__init__(samples=64)
        self.seq_length, self.tokenizer = seq_length, Tokens()
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size


class Told(pl.Callback):
    """Notes each step's loss and what is there, and dies where that is asked for."""

    def __init__(self, run: str, folder: str, die: int):
        self.run, self.folder, self.die = run, folder, die

    def setup(self, *args: Any, **kwargs: Any) -> None:
        """Seed Megatron's random numbers, as NeMo does where there is a GPU."""
        tensor_parallel.get_cuda_rng_tracker().reset()
        tensor_parallel.model_parallel_cuda_manual_seed(1234)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        note("loss", run=self.run, step=trainer.global_step, loss=outputs["loss"].item())

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        there = sorted(path.name for path in Path(self.folder).rglob("checkpoints/*"))
        note("step", run=self.run, step=trainer.global_step, there=there)
        if self.die and trainer.global_step == self.die:
            os.kill(os.getpid(), signal.SIGKILL)


def recipe_of(folder: str, last: int) -> Any:
    recipe = llama32_1b.pretrain_recipe(dir=folder, name="small", num_nodes=1, num_gpus_per_node=2)
    for name, value in SMALL.items():
        setattr(recipe.model.config, name, value)
    recipe.data = fdl.Config(Words, seq_length=16, global_batch_size=2, micro_batch_size=1)
    recipe.trainer.accelerator, recipe.trainer.plugins = "cpu", None
    recipe.trainer.max_steps, recipe.trainer.limit_val_batches, recipe.trainer.val_check_interval = last, 0, 0.0
    recipe.trainer.enable_progress_bar = recipe.trainer.enable_model_summary = False
    recipe.trainer.strategy.ckpt_async_save = False
    recipe.optim.config.bf16, recipe.optim.config.clip_grad = False, 0.0
    recipe.log.tensorboard, disk = None, recipe.log.ckpt
    disk.train_time_interval, disk.filename, disk.monitor, disk.mode = None, "{step}", "step", "max"
    disk.save_last, disk.save_top_k, disk.save_optim_on_train_end = "link", 2, True
    return recipe


def train(run: str, folder: str, last: int, every: int = 0, saves: int = 2, die: int = 0, **settings: Any) -> None:
    """Train to a step, from the newest checkpoint there is.

    A checkpoint goes to memory every so many steps (0: mlflash has no part in it), and NeMo itself writes one each
    `saves` steps. All ranks are killed after step `die`. The settings are those of the wrap.
    """
    recipe = recipe_of(folder, last)
    recipe.log.ckpt.every_n_train_steps = saves
    recipe.trainer.callbacks.append(fdl.Config(Told, run, folder, die))
    torch.manual_seed(100 + int(os.environ["RANK"]))
    if not every:
        fdl.build(recipe)()
        return
    from mlflash.adapters.distributed import init_process_group
    from mlflash.adapters.nemo import MLFlashCheckpointCallback, wrap_trainer_and_auto_resume_with_mlflash

    if not torch.distributed.is_initialized():
        init_process_group(host="127.0.0.1")
    flash = f"{folder}/mlflash"
    recipe.trainer.callbacks.append(fdl.Config(MLFlashCheckpointCallback, flash, every_n_steps=every))
    trainer, resume = fdl.build(recipe.trainer), fdl.build(recipe.resume)
    resume = wrap_trainer_and_auto_resume_with_mlflash(
        trainer, flash, async_save=True, default_auto_resume=resume, **settings
    )
    model, data, log, optim = fdl.build([recipe.model, recipe.data, recipe.log, recipe.optim])
    llm.pretrain(model, data, trainer, log=log, resume=resume, optim=optim)


def main(runs: list[dict[str, Any]]) -> None:
    with on_cpu():
        for run in runs:
            train(**run)
            note("done", run=run["run"], mlflash="mlflash" in sys.modules)
    torch.distributed.destroy_process_group()
