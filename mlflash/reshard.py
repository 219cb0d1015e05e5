"""A checkpoint of other ranks, or in other shards → this run's: each rank puts its state together in a slot of its own.

    gather     what the old ranks' slots hold: entries, plain leaves, checksums of whole tensors
    plan       of which parts each tensor is made (see `shards`), and who has them
    exchange   parts on this node are read from its files; the others are asked for (see `parcels`)
    commit     the new slot is protected and committed like a save; only then may the old ones go

What each old rank had its own of goes to the rank of its number; where there is none, a rank keeps what it has.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from . import commit, shards
from .errors import CorruptSlot, MlflashError, StructureMismatch
from .flatten import flatten, flatten_or_none
from .layout import PAGE_NBYTES
from .opened import Elsewhere, Readable, held_by_name
from .parcels import Parcel, items
from .parts import Parts
from .points import reach
from .rebuild import compare, fill, refuse_differences
from .reunion import Home
from .shards import box
from .slot import Slot
from .snapshot import Snapshot
from .stage import Plan, Stage
from .state import Entry, Flat, Leaf, live_bytes

log = logging.getLogger("mlflash")

_NAMED = 5  # leaves named in a warning


@dataclasses.dataclass
class _Wanted:
    """The state of a new rank: where it goes, and of what it is made.

    Attributes:
        flat: its leaves; the values are live ones, or None where there are none yet.
        made_of: for each leaf that is brought, by number, the parts of old shards that make it up.
        kept: names of what each old rank had its own of, and this rank's number none.
    """

    flat: Flat
    made_of: dict[int, list[shards.Fragment]]
    kept: list[str]


@dataclasses.dataclass
class Resharded:
    """A state that was put together in an own slot (its share stays empty), and not loaded yet."""

    slot: Slot
    share: Slot
    plan: Plan
    flat: Flat

    def load(self, state: Any) -> None:
        """Fill it into a live state, in place. Not collective."""
        layout = self.plan.layout
        fill(state, self.flat.structure.tree, layout.entries, self.flat.plain, self.slot.reader(layout.extents))


def reshard(parts: Parts, old: Readable, state: Any) -> Resharded:
    """Put this rank's state together. Collective over the world; nothing of ``state`` is changed.

    Raises:
        StructureMismatch: on all ranks, where that of any does not go together with the checkpoint.
        MemoryTooSmall: on all ranks, where there is no room for it beside the old slots.
        CorruptSlot: on all ranks, where a part did not arrive whole on any.
    """
    world = parts.world
    error: MlflashError | None = None
    wanted: _Wanted | None = None
    try:
        wanted = _want(parts, old, state)
    except MlflashError as problem:
        error = problem
    except Exception as problem:  # state_dict() of an object may raise anything: all ranks must hear of it
        error = StructureMismatch(f"the state could not be read: {problem!r}")
    if error is not None:
        error.rank, error.node, error.step = world.rank, world.node_name, old.step
    world.raise_together(error)
    assert wanted is not None
    plan = Stage(parts.config.block_nbytes, parts.crew, parts.config.timeout_s).plan(wanted.flat)
    taken = parts.shelf.take(0, leave=True)
    assert taken is not None, "both own slots hold something"
    slot, share = taken
    made = Resharded(slot, share, plan, wanted.flat)
    try:
        parts.ensure_room([(slot, plan.layout.extents.nbytes)], waiting=[slot])
        assert slot.segment is not None
        world.wait_for(slot.segment.ready.is_set)
        slot.unseal()
        slot.view[PAGE_NBYTES : PAGE_NBYTES + len(plan.manifest)] = np.frombuffer(plan.manifest, dtype=np.uint8)
        whole = _fill_slot(old, wanted, plan, slot)
        if not world.agree([int(whole)])[0]:
            raise CorruptSlot("parts of the checkpoint did not arrive whole", step=old.step)
    except MlflashError:  # the same on all ranks
        give_up(parts, made)
        raise
    reach("restore.resharded")
    if kept := wanted.kept:
        named = ", ".join(kept[:_NAMED]) + (f" and {len(kept) - _NAMED} more" if len(kept) > _NAMED else "")
        log.warning("each rank of the checkpoint had its own of %s, and there was no rank %d: it stays as it is",
                    named, world.rank)  # fmt: skip
    return made


def give_up(parts: Parts, made: Resharded) -> None:
    """Let saves write the slots that a state was put together in, as it was not loaded. Not collective."""
    parts.shelf.give_back([made.slot, made.share])


def protect(parts: Parts, old: Readable, made: Resharded) -> None:
    """Commit what was put together, as a save of its own; then the old slots may go. Collective over the world.

    Where it cannot be, that is a warning, and the old slots stay until a newer step is committed.
    """
    save = commit.Save(Snapshot(old.step, lambda: None), parts.next_attempt())
    save.slot, save.share, save.plan, save.segment = made.slot, made.share, made.plan, made.slot.segment
    try:
        commit.run(save, parts)
        made.slot.record_restores(save.attempt, old.restores)
    except MlflashError as error:
        if parts.world.rank in (0, error.rank):
            log.warning("the restored step has no redundancy among the ranks of this run: %s", error)
    old.close()


def unless_alike(parts: Parts, home: Home, state: Any) -> Home | Elsewhere:
    """Tell whether the state of any rank has other shards than its checkpoint; else it can be loaded as it is.

    Collective over the world.
    """
    if not parts.world.agree([int(not _only_shards_differ(state, home))])[0]:
        return Elsewhere(home.header.attempt, home.header.step, parts.restores, {parts.world.rank: home},
                         home.files)  # fmt: skip
    return home


def _only_shards_differ(state: Any, home: Home) -> bool:
    if "torch.distributed.tensor" not in sys.modules and all(e.shape == e.global_shape for e in home.manifest.entries):
        return False  # nothing on either side is a shard
    flat = flatten_or_none(state)
    if flat is None:
        return False
    live = {leaf.entry.name: leaf.entry for leaf in flat.leaves}
    entries = home.manifest.entries
    alike = tuple(_as_live(entry, live) for entry in entries)
    if all((a.offset, a.shape) == (b.offset, b.shape) for a, b in zip(alike, entries, strict=True)):
        return False
    return not compare(state, home.manifest.tree, alike)


def _as_live(entry: Entry, live: Mapping[str, Entry]) -> Entry:
    """An entry of the checkpoint, in the shard that a live tensor of its name is."""
    mine = live.get(entry.name)
    same = (entry.kind, entry.dtype, entry.global_shape)
    return mine if mine is not None and (mine.kind, mine.dtype, mine.global_shape) == same else entry


def _want(parts: Parts, opened: Readable, state: Any) -> _Wanted:
    """Say what this rank's state is made of.

    Its structure is that of the old rank of its number, since objects (an optimizer before its first step) may not
    have theirs yet; its shards are those of the live tensors.
    """
    world, olds = parts.world, opened.olds
    flat = flatten(state)
    live = {leaf.entry.name: leaf for leaf in flat.leaves}
    own = olds[world.rank if world.rank in olds else sorted(olds)[world.rank % len(olds)]]
    near = {rank for rank in olds if opened.is_near(rank)}
    held = held_by_name(opened)
    live_entries = {name: leaf.entry for name, leaf in live.items()}
    entries = [_as_live(entry, live_entries) for entry in own.entries]
    if world.rank not in olds:  # what each had its own of may have any shape here
        entries = [live_entries.get(e.name, e) if shards.is_private(held[e.name]) else e for e in entries]
    refuse_differences(state, own.tree, tuple(entries))
    leaves: list[Leaf] = []
    starts: dict[int, int] = {}
    made_of: dict[int, list[shards.Fragment]] = {}
    kept = []
    for number, (entry, before) in enumerate(zip(entries, own.entries, strict=True)):
        tie = starts.setdefault(before.start, number) if before.nbytes else number
        if dataclasses.replace(entries[tie], name=entry.name, start=entry.start) != entry:
            tie = number  # tied before, but cut into other shards now
        value = live[entry.name].value if entry.name in live else None
        leaves.append(Leaf(dataclasses.replace(entry, start=0), value, -1 if tie == number else tie))
        if tie != number or not entry.nbytes:
            continue
        if value is None and any(one.check is None for one in held[entry.name]):
            raise StructureMismatch(
                "this tensor was saved in shards, and the state given does not say in which it is wanted: make the "
                "optimizer's state before (see mlflash.adapters.fsdp.init_optim_state)", tensor=entry.name,
            )  # fmt: skip
        found = shards.fragments(entry, held[entry.name], world.rank, near)
        if found is None:
            kept.append(entry.name)
        else:
            made_of[number] = found
    paths = shards.plain_leaves(own.tree)
    here = shards.plain_leaves(flat.structure.tree)
    values: list[Any] = [None] * len(paths)
    for path, at in paths.items():
        values[at] = flat.plain[here[path]] if path in here else own.plain[path]
    values, private = shards.merge_plain(values, paths, {rank: one.plain for rank, one in olds.items()}, world.rank)
    return _Wanted(Flat.of(leaves, own.tree, values), made_of, [*kept, *private])


def _fill_slot(opened: Readable, wanted: _Wanted, plan: Plan, slot: Slot) -> bool:
    """Bring all parts into the new slot; whether they arrived whole. Collective over the world."""
    payload = slot.payload(plan.layout.extents)
    payload[:] = 0
    parcels = []
    for number, (entry, leaf) in enumerate(zip(plan.layout.entries, wanted.flat.leaves, strict=True)):
        room = payload[entry.start : entry.start + entry.nbytes]
        if leaf.tie < 0 and entry.nbytes and number not in wanted.made_of and leaf.value is not None:
            room[:] = live_bytes(leaf.value)
        for part in wanted.made_of.get(number, ()):
            target = items(room, entry)[box(part.target, part.shape)]
            parcels.append(Parcel(part.rank, part.number, part.source, part.shape, target))
    return opened.read(parcels)
