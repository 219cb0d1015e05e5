"""A small GPT that Megatron Bridge trains on CPUs, as the page on Megatron has it; notes each loss.

    bridge_job.py FOLDER LAST [DIE]

FOLDER: Bridge's ``save`` and ``load``. DIE: all ranks are killed behind this iteration.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from typing import Any

import bridge_on_cpu as bridge
import torch
import torch.distributed as dist
from random_texts import Texts, text_of
from records import note

from mlflash.adapters import megatron_bridge
from mlflash.adapters.distributed import init_process_group

LENGTH = 16


class Tokens(Texts):
    """Random text."""

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        text = text_of(number, LENGTH + 1, 128)
        return {"tokens": text[:-1], "labels": text[1:], "loss_mask": torch.ones(LENGTH),
                "position_ids": torch.arange(LENGTH),
                "attention_mask": torch.ones(1, LENGTH, LENGTH).tril().logical_not()}  # fmt: skip


@dataclasses.dataclass
class Data(bridge.DatasetProvider):  # type: ignore[misc]
    """That text, as Bridge asks for data."""

    skip_getting_attention_mask_from_dataset: bool = False
    seq_length: int = LENGTH

    def build_datasets(self, context: Any) -> tuple[Tokens, None, None]:
        return Tokens(context.train_samples), None, None


class Told(bridge.Callback):  # type: ignore[misc]
    """Notes each loss, and dies where that is asked for."""

    def __init__(self, die: int):
        self.die = die

    def on_train_step_start(self, context: Any) -> None:
        if self.die and context.state.train_state.step == self.die:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_step_end(self, context: Any) -> None:
        step = context.state.train_state.step + 1
        note("loss", step=step, loss=float(context.loss_dict["lm loss"]), norm=float(context.grad_norm))


def main(folder: str, last: int, die: int = 0) -> None:
    """Train to an iteration, from the newest checkpoint there is."""
    config = bridge.config
    # Hidden dropout takes its random numbers from where the data loader takes some, as there is no GPU.
    model = bridge.GPTModelProvider(
        num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=LENGTH, vocab_size=128, attention_dropout=0.1,
        hidden_dropout=0.0, transformer_layer_spec=bridge.local_layer_spec, bias_dropout_fusion=False,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False, cross_entropy_loss_fusion=False,
        persist_layer_norm=False,
    )  # fmt: skip
    cfg = config.ConfigContainer(
        model=model,
        train=config.TrainingConfig(train_iters=last, global_batch_size=4, micro_batch_size=2),
        validation=config.ValidationConfig(eval_iters=0),
        optimizer=config.OptimizerConfig(lr=1e-2, min_lr=1e-2, clip_grad=0.0, use_distributed_optimizer=True),
        ddp=config.DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
        scheduler=config.SchedulerConfig(
            lr_decay_style="constant", lr_warmup_iters=0, start_weight_decay=0.1, end_weight_decay=0.1
        ),
        dataset=Data(dataloader_type="single", num_workers=0, pin_memory=False, persistent_workers=False),
        logger=config.LoggerConfig(),
        tokenizer=bridge.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=127),
        checkpoint=config.CheckpointConfig(save=folder, load=folder, save_interval=0),
        dist=config.DistributedInitConfig(distributed_backend="gloo"),
    )
    cfg.checkpoint.non_persistent_ckpt_type = "local"
    cfg.checkpoint.non_persistent_save_interval = 3
    cfg.checkpoint.non_persistent_local_ckpt_dir = "run42"
    megatron_bridge.use(cfg.checkpoint, redundancy="copy")
    with bridge.on_cpu():
        bridge.pretrain(cfg, bridge.forward_step, [Told(die)])


if __name__ == "__main__":
    init_process_group(host="127.0.0.1")
    main(sys.argv[1], *map(int, sys.argv[2:]))
    dist.destroy_process_group()
