"""Checks whether the ranks of a process group can save a state dict together."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor

from mlflash.errors import StateError
from mlflash.state.leaves import live_bytes

from .states import LocalState

log = logging.getLogger("mlflash")


def refuse_other_shards(state_dict: Mapping[str, Any], ranks: Sequence[int]) -> None:
    """Refuse a local state dict if other ranks of the group have other shards under the same names. Not collective.

    Raises:
        StateError: some ranks have. ``found`` lists them.
    """
    if isinstance(state_dict, LocalState) and (others := sorted(state_dict.others & set(ranks))):
        raise StateError(
            "other ranks of this process group hold other shards, under the same names: save each local state under an "
            "id of its own, on the ranks that hold the same shard (fsdp.Ranker(model).get_rep_groups()). Or save "
            "fsdp.sharded_state_dict(model, optimizer) on all ranks together", rank=dist.get_rank(),
            found=f"ranks {others}",
        )  # fmt: skip


def refuse_missing_shards(state_dict: Mapping[str, Any], ranks: Sequence[int]) -> None:
    """Refuse DTensors if the group does not hold all of their shards. Not collective.

    Raises:
        StateError: shards are missing. ``tensor`` is the first such DTensor.
    """
    whole = set[tuple[Any, ...]]()
    for name, value in flatten_state_dict(dict(state_dict))[0].items():
        if not isinstance(value, DTensor) or (kind := (value.device_mesh, *value.placements)) in whole:
            continue
        mesh, placements = value.device_mesh.mesh, value.placements
        places = [[slice(None)] if one.is_replicate() else range(size)
                  for one, size in zip(placements, mesh.shape, strict=True)]  # fmt: skip
        for place in itertools.product(*places):
            if not set(mesh[place].flatten().tolist()) & set(ranks):
                raise StateError(
                    "this tensor is sharded over ranks that are not in the process group: save it on all of them "
                    "together, under one id (no tp or ep in it), such as with process_group=None", tensor=name,
                    expected=f"ranks {sorted(mesh.flatten().tolist())}", found=f"ranks {sorted(ranks)}",
                )  # fmt: skip
        whole.add(kind)


def warn_of_unlike(state_dict: Mapping[str, Any], ranks: Sequence[int], group: Any) -> None:
    """Warn if tensors differ between ranks although one rank's values are saved for all.

    Collective over the group.

    Args:
        state_dict: its tensors must not change during the call.
        ranks: ranks of the world, in the order of the group.
        group: gloo group of these ranks.
    """
    plain = (torch.Tensor, torch.nn.Parameter)
    mine = {name: xxhash.xxh3_64_intdigest(live_bytes(value).data)
            for name, value in flatten_state_dict(dict(state_dict))[0].items() if type(value) in plain}  # fmt: skip
    said: list[Any] = [None] * len(ranks)
    dist.all_gather_object(said, mine, group=group)
    first = dict[str, tuple[int, int]]()
    unlike = dict[str, tuple[int, int]]()
    for rank, digests in zip(ranks, said, strict=True):
        for name, digest in digests.items():
            other, known = first.setdefault(name, (rank, digest))
            if known != digest:
                unlike.setdefault(name, (other, rank))
    if unlike and dist.get_rank() == min(ranks):
        name, (one, other) = next(iter(unlike.items()))
        log.warning("%d tensors, such as %s on ranks %d and %d, differ between ranks that save them together. They are "
                    "not DTensors, so they count as the same, and one rank's values are saved for all. If they should "
                    "differ, as experts do, save them under an id of their own, on the ranks that hold the same values",
                    len(unlike), name, one, other)  # fmt: skip
