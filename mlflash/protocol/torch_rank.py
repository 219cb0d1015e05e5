"""Converts ranks as PyTorch and users name them to ranks of this run."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError, WorldMismatch
from .ranks import from_torch


def replicas_of(
    replicated: Any, rank: int, size: int, mpi_group: Any, torch_group: Any
) -> tuple[list[int], list[str]] | None:
    """The ranks that hold the same state as this one, ascending, and patterns for the names of that state.

    Not collective; nothing is sent over a given group.

    Args:
        replicated: an mpi4py communicator or group, a torch.distributed process group, ranks, or True for all ranks;
            or a mapping from patterns of names to one of these; None: the user has not said so.

    Raises:
        ConfigError: it is none of these, or this rank is not in it.
    """
    if replicated is None:
        return None
    if not isinstance(replicated, Mapping):
        return _members_of(replicated, rank, size, mpi_group, torch_group), ["*"]
    sets = [_members_of(group, rank, size, mpi_group, torch_group) for group in replicated.values()]
    if not sets or any(members != sets[0] for members in sets) or not all(isinstance(p, str) for p in replicated):
        raise ConfigError("a dict for replicated= maps patterns of names to ranks, and these must be the same for all",
                          expected="{'model.*': ranks, ...}", found=repr(replicated))  # fmt: skip
    return sets[0], list(replicated)


def _members_of(replicated: Any, rank: int, size: int, mpi_group: Any, torch_group: Any) -> list[int]:
    if replicated is True:
        return list(range(size))
    torch = sys.modules.get("torch")
    of_mpi = hasattr(replicated, "Get_group") or hasattr(replicated, "Translate_ranks")
    if size > 1 and mpi_group is not None and of_mpi:
        group = replicated.Get_group() if hasattr(replicated, "Get_group") else replicated
        ranks = group.Translate_ranks(list(range(group.size)), mpi_group)
    elif (
        torch is not None
        and torch.distributed.is_available()
        and isinstance(replicated, torch.distributed.ProcessGroup)
    ):
        ranks = from_torch(torch.distributed.get_process_group_ranks(replicated), torch_group)
    elif isinstance(replicated, Sequence) and all(isinstance(one, int) for one in replicated):
        ranks = replicated
    else:
        ranks = ()
    members = sorted({int(one) for one in ranks})
    if rank not in members or not 0 <= members[0] <= members[-1] < size:
        raise ConfigError(
            "replicated= must say which ranks hold the same state as this one",
            expected=f"a communicator, process group or list of ranks below {size}, with rank {rank} in it",
            found=repr(replicated),
        )
    return members


def some_ranks(torch_group: Any, rank: int, size: int) -> tuple[int, ...] | None:
    """The ranks of the job that a process group has, in its order; None: all ranks, or no group was given.

    Not collective; nothing is sent over the group.

    Args:
        torch_group: of torch.distributed, whose ranks are those of the job; None: none was given.

    Raises:
        ConfigError: it is no process group, or this process is not in it.
        WorldMismatch: torch.distributed numbers the ranks differently than the launcher does.
    """
    if torch_group is None:
        return None
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(torch_group, torch.distributed.ProcessGroup):
        raise ConfigError(
            "process_group= must be a group of torch.distributed that has this process",
            expected="what torch.distributed.new_group gives its ranks", found=repr(torch_group),
        )  # fmt: skip
    ranks = tuple(torch.distributed.get_process_group_ranks(torch_group))
    if len(ranks) >= size:
        return None
    if (torch_rank := torch.distributed.get_rank()) != rank:
        raise WorldMismatch(
            "torch.distributed and the launcher number the ranks differently, so mlflash cannot find the ranks of the "
            "process group: initialize torch.distributed by mlflash.adapters.distributed.init_process_group",
            expected=f"torch.distributed rank {rank} of {size}", found=f"torch.distributed rank {torch_rank}",
        )  # fmt: skip
    return ranks


def check_torch_rank(rank: int, size: int, torch_group: Any) -> None:
    """Raise WorldMismatch if the rank in torch.distributed is not the rank of this run."""
    torch = sys.modules.get("torch")
    if torch is None or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    torch_rank = torch.distributed.get_rank(torch_group)
    torch_size = torch.distributed.get_world_size(torch_group)
    if (torch_rank, torch_size) != (rank, size):
        raise WorldMismatch(
            "torch.distributed and MPI number the ranks differently: initialize torch.distributed with the MPI "
            "rank and size (mlflash.adapters.distributed.init_process_group does so), give Checkpointer a comm ordered "
            "like it (comm.Split(0, torch_rank)), or the process group that has the ranks of comm (process_group=)",
            expected=f"torch.distributed rank {rank} of {size}, as in MPI",
            found=f"torch.distributed rank {torch_rank} of {torch_size}",
        )
