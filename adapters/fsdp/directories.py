"""The directory of a name: each name is drained to its own, because several names have the same steps."""

from __future__ import annotations

import os

import torch.distributed as dist

from mlflash.draining.checkpoint_directory import list_checkpoints
from mlflash.errors import ConfigError
from mlflash.storage.store import open_store

from . import ids
from .groups import Group


def of_name(directory: str | None, name: str, group: Group) -> str | None:
    """Give the directory of a name, which is inside the common directory.

    Collective over the group.

    Older versions of mlflash drained all names into the common directory. If only this name has checkpoints there, its
    directory is the common one.

    Raises:
        ConfigError: the common directory has checkpoints of this name and of others, which overwrote each other.
    """
    if directory is None:
        return None
    folder, told = ids.folder_of(name), [0, 0]
    if dist.get_rank() == min(group.ranks):
        try:
            owners = [listed.card.owner for listed in list_checkpoints(open_store(directory))]
            mine = sum(owner.endswith(folder[-9:]) for owner in owners)
            told = [mine, len(owners) - mine]
        except OSError:  # the Checkpointer reports it
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
