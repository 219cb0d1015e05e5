"""Megatron-LM and Megatron Core: local checkpoints and sharded states in the memory of the nodes.

    nvrx          the classes that Megatron looks for: NVRx's own, or classes of the same names
    request       a save in the background, for Megatron's queue
    local         the manager of local checkpoints, and let Megatron's own use it
    persistent    Megatron's own checkpoints on disk; say at the end what is in memory only
    padding       keep padding out of the optimizer's state
    shards        `dist_checkpointing.save` and `load`, in any layout
    easy          save every so many iterations, with EasyCkpt's calls

Example:
    from mlflash.adapters.megatron import install

    install()  # the first lines of pretrain_gpt.py, for --non-persistent-ckpt-type local
"""

import importlib
from typing import Any

from ..pickles import allow
from .local import LocalCheckpoints, checkpointing_context, install
from .nvrx import CheckpointingException, work_without_nvrx
from .request import AsyncRequest

_OF_MEGATRON = {"LoadShards": "shards", "SaveShards": "shards"}  # which import Megatron


def __getattr__(name: str) -> Any:
    if name in _OF_MEGATRON:
        return getattr(importlib.import_module(f"{__name__}.{_OF_MEGATRON[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["AsyncRequest", "CheckpointingException", "LoadShards", "LocalCheckpoints", "SaveShards", "allow",
           "checkpointing_context", "install", "work_without_nvrx"]  # fmt: skip
