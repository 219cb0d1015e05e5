"""Where what an id names is drained to: a directory of its own, as what has other names has the same steps."""

from __future__ import annotations

import os

import torch.distributed as dist

from mlflash.draining.checkpoint_directory import list_checkpoints
from mlflash.errors import ConfigError
from mlflash.storage.store import open_store

from . import ids
from .groups import Group


def of_name(directory: str | None, name: str, group: Group) -> str | None:
    """Give the directory of a name: one inside the directory of all.

    Collective over the group.

    Older builds drained what has different names into the same folders. What they have written under one name only
    stays where it is, and is gone on with there.

    Raises:
        ConfigError: there are checkpoints of several names, this one among them, which lie over each other.
    """
    if directory is None:
        return None
    folder, told = ids.folder_of(name), [0, 0]
    if dist.get_rank() == min(group.ranks):
        try:
            owners = [listed.card.owner for listed in list_checkpoints(open_store(directory))]
            mine = sum(owner.endswith(folder[-9:]) for owner in owners)
            told = [mine, len(owners) - mine]
        except OSError:  # the Checkpointer says so
            pass
    dist.broadcast_object_list(told, min(group.ranks), group=group.status)
    mine, others = told
    if mine and others:
        raise ConfigError(
            "an older version of mlflash drained checkpoints of several ids into the same folders, over each other: "
            "give another directory, and do not load these", expected=f"checkpoints of {name or 'one id'} only",
            found=directory,
        )  # fmt: skip
    if mine:
        return directory
    return os.path.join(directory, folder.lstrip("."))
