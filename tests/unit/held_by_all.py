"""Of which parts of which old ranks a new shard is made, with an object for each leaf of each rank.

As mlflash found it before it kept a row of numbers for each rank: `mlflash.state.old_ranks` must answer as this does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlflash.errors import StructureMismatch
from mlflash.state.leaves import Entry
from mlflash.state.shards import Box, Fragment, covers, overlap


@dataclasses.dataclass(frozen=True)
class Held:
    """A tensor as one old rank holds it.

    Attributes:
        rank: the old rank.
        number: of the entry in its manifest.
        entry: what it says.
        check: a checksum of its bytes where it is whole; None where it is a shard.
    """

    rank: int
    number: int
    entry: Entry
    check: int | None = None


def fragments(want: Entry, held: Sequence[Held], rank: int, near: Iterable[int] = ()) -> list[Fragment] | None:
    """Find what a new shard is made of.

    Args:
        want: the new shard.
        held: all that old ranks hold of the tensor.
        rank: the new rank.
        near: old ranks whose slots are on this node: they are taken first; else ranks take turns.

    Returns:
        Its parts; None where each old rank had its own and there was none of this rank's number.

    Raises:
        StructureMismatch: it is another tensor, it is not whole, or it does not reshard.
    """
    if is_private(held):
        held = [one for one in held if one.rank == rank]
        if not held:
            return None
        if want.shape != want.global_shape:
            raise StructureMismatch("each rank had its own version of this tensor, so it cannot be cut into shards",
                                    tensor=want.name)  # fmt: skip
    for one in held:
        if (one.entry.kind, one.entry.dtype, one.entry.global_shape) != (want.kind, want.dtype, want.global_shape):
            raise StructureMismatch("a tensor differs from that of the checkpoint", tensor=want.name,
                                    expected=_described(one.entry), found=_described(want))  # fmt: skip
    chosen = _nearest(held, rank, set(near))
    found = []
    for one in chosen:
        if (both := overlap((want.offset, want.shape), (one.entry.offset, one.entry.shape))) is not None:
            source = tuple(a - b for a, b in zip(both[0], one.entry.offset, strict=True))
            target = tuple(a - b for a, b in zip(both[0], want.offset, strict=True))
            found.append(Fragment(one.rank, one.number, source, target, both[1]))
    if not covers(want.shape, [(part.target, part.shape) for part in found]):
        raise StructureMismatch("parts of this tensor are not in the checkpoint", tensor=want.name,
                                expected=f"all of {want.shape} at {want.offset}",
                                found=f"{len(found)} parts of it")  # fmt: skip
    return found


def is_private(held: Sequence[Held]) -> bool:
    """Whether old ranks had a tensor whole, but not alike."""
    distinct = {(one.entry.kind, one.entry.dtype, one.entry.global_shape, one.check) for one in held}
    return len(distinct) > 1 and all(one.check is not None for one in held)


def _described(entry: Entry) -> str:
    return f"{entry.kind} {entry.dtype} {entry.global_shape}"


def _nearest(held: Sequence[Held], rank: int, near: set[int]) -> list[Held]:
    """Of each distinct shard one holder: on this node, else one that depends on the rank, so that all are asked."""
    holders: dict[Box, list[Held]] = {}
    for one in held:
        holders.setdefault((one.entry.offset, one.entry.shape), []).append(one)
    chosen = []
    for those in holders.values():
        here = [one for one in those if one.rank in near]
        chosen.append(here[0] if here else those[rank % len(those)])
    return chosen


def private_plain(held: Mapping[int, Mapping[str, Any]]) -> set[str]:
    """The paths of plain leaves that old ranks had, but not alike.

    Args:
        held: of each old rank, its values by path.
    """
    seen: dict[str, str] = {}
    return {path for leaves in held.values() for path, value in leaves.items()
            if seen.setdefault(path, repr(value)) != repr(value)}  # fmt: skip


def merge_plain(live: Sequence[Any], paths: Mapping[str, int], held: Mapping[int, Mapping[str, Any]], rank: int
                ) -> tuple[list[Any], list[str]]:  # fmt: skip
    """Choose the plain leaves of a new rank: what all old ranks have, else what the old rank of its number has.

    Args:
        live: the values that this rank has, by number.
        paths: their numbers, by path.
        held: of each old rank, its values by path.
        rank: the new rank.

    Returns:
        The values to take; and the paths of those that stay as they are, as no old rank has this rank's number.
    """
    values, kept, private = list(live), [], private_plain(held)
    for path, number in paths.items():
        if path not in private:
            values[number] = next(leaves[path] for leaves in held.values() if path in leaves)
        elif path in held.get(rank, {}):
            values[number] = held[rank][path]
        else:
            kept.append(path)
    return values, kept
