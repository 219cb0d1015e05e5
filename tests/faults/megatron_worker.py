"""Rank program for tests that kill and relaunch: a small GPT trained by Megatron."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import megatron_pretrain
from records import note
from traps import set_traps

from mlflash.adapters.distributed import init_process_group
from mlflash.adapters.megatron import install
from mlflash.launch.launcher_variables import launched


def edit_training_py(settings: Mapping[str, Any]) -> None:
    """Do to Megatron's training.py what EasyCkpt's page does: three of its names, and a line in two functions."""
    from megatron.training import training

    from mlflash.adapters.megatron.easy import initialize_easyckpt, load_checkpoint, save_checkpoint_if_needed

    train, decide = training.train, training.checkpoint_and_decide_exit

    def initialize_and_train(*args: Any, **named: Any) -> Any:
        initialize_easyckpt(**settings)
        return train(*args, **named)

    def save_and_decide(model: Any, optimizer: Any, scheduler: Any, iteration: int, *args: Any) -> Any:
        save_checkpoint_if_needed(iteration, model, optimizer, scheduler)
        return decide(model, optimizer, scheduler, iteration, *args)

    training.load_checkpoint = load_checkpoint
    training.train, training.checkpoint_and_decide_exit = initialize_and_train, save_and_decide


def main(last: int, flags: Sequence[str] = (), traps: Sequence[dict[str, object]] = (),
         easy: Mapping[str, Any] | None = None) -> None:  # fmt: skip
    """Train to a step, from the newest checkpoint there is."""
    set_traps(traps, launched(os.environ).rank)
    init_process_group(host="127.0.0.1")
    note("start")
    if easy is None:
        install()
    else:
        edit_training_py(easy)
    megatron_pretrain.main(["--exit-interval", str(last), *flags])


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
