"""Recognize the checkpoints of other libraries by the names of their files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection

from .store import Store

DCP = "PyTorch DCP"
SAFETENSORS = "Hugging Face safetensors"
TORCH_CHECKPOINTING = "torch_checkpointing"

_NEWEST = 3  # folders that are looked into
_OF_FIRST_RANK = re.compile(r".+_0\.pt")
_OWN = (".h5", ".mlflash")


def format_of(names: Collection[str]) -> str:
    """Name the format of a checkpoint whose folder has these names in it.

    Returns:
        `DCP`, `SAFETENSORS` or `TORCH_CHECKPOINTING`. "": none of them, or the checkpoint is mlflash's own.
    """
    if any(name.endswith(_OWN) for name in names):
        return ""
    if ".metadata" in names:
        return DCP
    if any(name.endswith(".safetensors") for name in names):
        return SAFETENSORS
    is_theirs = "metadata.pkl" in names or any(map(_OF_FIRST_RANK.fullmatch, names))
    return TORCH_CHECKPOINTING if is_theirs else ""


def find(store: Store) -> tuple[str, str] | None:
    """Look for another library's checkpoint in a directory and its last folders: where it is, and its format."""
    with contextlib.suppress(OSError):
        names = store.names()
        for place in (store, *map(store.at, reversed(names[-_NEWEST:]))):
            with contextlib.suppress(OSError):
                if form := format_of(place.names()):
                    return place.path, form
    return None
