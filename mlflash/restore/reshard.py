"""A checkpoint of other ranks, or in other shards → this run's: each rank puts its state together in a slot of its own.

    gather     what the old ranks' slots hold: entries, plain leaves, checksums of whole tensors
    plan       which parts make up each tensor (see `shards`), and which ranks have them
    exchange   parts on this node are read from its files; ranks are asked for the others (see `fetch`)
    commit     the new slot is protected and committed like a save; only then may the old ones be freed

What each old rank had of its own goes to the rank with its number. If there was no such rank, a rank keeps what it has.
If there is no such rank any more, it is left behind. Rank 0 logs both.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np

from ..channel.client import TrainerState
from ..channel.wanted_parts import WantedPart, items
from ..crash_points import reach
from ..errors import Closed, CorruptSlot, DeadlineExceeded, MlflashError, SaveFailed, StructureMismatch
from ..memory.slot import Slot
from ..protect.deduplication import Plan
from ..protect.rank_checkpoint import RankCheckpoint
from ..save.save_queue import PendingSave
from ..save.snapshot import Snapshot
from ..save.stage import Staging
from ..state.boxes import box
from ..state.flatten import flatten, flatten_or_none
from ..state.layout import PAGE_NBYTES
from ..state.leaves import Entry, Flat, Leaf, Tree, live_bytes, place_of
from ..state.old_ranks import OldRank, OldRanks, Parts
from ..state.paths import plain_leaves
from ..state.rebuild import Comparison, Filling, compare
from ..state.torch_objects import has_shape_of, is_like, parameters
from ..text import listed, named
from .open_in_memory import OpenCheckpoint

log = logging.getLogger("mlflash")

T = TypeVar("T")

_NAMED = 5  # leaves named in a warning
_PARTS = 4096  # parts whose numbers become Python objects at a time


@dataclasses.dataclass
class _Wanted:
    """The state of a new rank: where it goes, and what it is made of."""

    flat: Flat  # its leaves; the values are live ones, or None if there are none yet
    made_of: dict[int, Parts]  # for each leaf that is brought, by number, the parts of old shards that make it up


@dataclasses.dataclass
class Resharded:
    """A state that was put together in an own slot (its share stays empty), and is not loaded yet."""

    slot: Slot
    share: Slot
    plan: Plan
    flat: Flat

    def filling(self, state: Any) -> Filling:
        layout = self.plan.layout
        read = self.slot.reader(layout.extents)
        return Filling(state, self.flat.structure.tree, layout.entries, self.flat.plain, read)


def reshard(trainer: TrainerState, old: OpenCheckpoint, state: Any, gives_way: bool = False) -> Resharded:
    """Put this rank's state together. Collective over the world; nothing in ``state`` is changed.

    Raises:
        StructureMismatch: on all ranks, if the state of any does not match the checkpoint.
        MemoryTooSmall: on all ranks, if there is no room for it next to the old slots.
        CorruptSlot: on all ranks, if a part did not arrive whole on any.
    """
    ranks = trainer.ranks

    def want() -> tuple[_Wanted, Plan]:
        wanted = _want(ranks.rank, old, state)
        stage = Staging(trainer.copy_threads, trainer.config.timeout_s, trainer.provenance)
        return wanted, stage.plan(wanted.flat)

    def together(work: Callable[[], T]) -> T:
        return ranks.together(work, lambda why: StructureMismatch(f"the state could not be read: {why}"), old.step)

    wanted, plan = together(want)
    slot, share = _lease_slots(trainer, old, plan.layout.extents.nbytes, gives_way)
    made = Resharded(slot, share, plan, wanted.flat)
    try:
        rooms = together(lambda: _make_rooms(wanted, plan, slot))
        if not ranks.all_of(old.read(_parts_in(rooms, wanted.made_of))):
            raise CorruptSlot("parts of the checkpoint did not arrive whole", step=old.step)
    except MlflashError as error:
        if error.agreed or not isinstance(error, DeadlineExceeded):  # otherwise the courier may still write to them
            trainer.slots.give_back(old)
        raise
    reach("restore.resharded")
    if ranks.rank == 0:
        _warn_of_own(old, ranks.size)
    return made


def _lease_slots(trainer: TrainerState, old: OpenCheckpoint, nbytes: int, gives_way: bool) -> tuple[Slot, Slot]:
    slots = trainer.slots

    def lease() -> tuple[Slot, Slot]:
        leased = slots.take(0, old, leave=True)
        if leased is None:
            raise SaveFailed("all slots of a rank are in use: views that load(copy=False) returned may still "
                             "exist", step=old.step)  # fmt: skip
        return leased

    def wait_for_pages(slot: Slot) -> None:
        if slot.segment is None or not slot.segment.ready.wait(trainer.config.timeout_s):
            raise SaveFailed(f"the pages of a slot were not there after {trainer.config.timeout_s:g} s", step=old.step)

    try:
        slot, share = trainer.ranks.on_all(lease)
        trainer.courier.call("make_room", slot.lease, nbytes, gives_way)
        trainer.ranks.on_all(lambda: wait_for_pages(slot))
    except DeadlineExceeded:  # the courier may still replace their files
        raise
    except MlflashError:  # the same on all ranks
        slots.give_back(old)
        raise
    return slot, share


def _warn_of_own(old: OpenCheckpoint, size: int) -> None:
    """Log what old ranks had of their own, if there is no such rank any more, or was none before."""
    olds = old.olds
    own = {name for name, spots in olds.spots.items() if name not in olds.apart and olds.is_private(spots)}
    own |= olds.plain_differ
    held = [(group.ranks, {*group.structure.names, *group.structure.paths}) for group in olds.groups]
    staying = {name for ranks, names in held if ranks[0] < size for name in names}
    gone, new = olds.ranks[olds.ranks >= size].tolist(), sorted({*range(size)} - {*olds.ranks.tolist()})
    how = f"step {old.step} was saved by {len(olds)} ranks, and this run has {size}"
    lost = {name for ranks, names in held if ranks[-1] >= size for name in names if name in own or name not in staying}
    if lost:
        log.warning("%s: what %s had of its own is left behind: %s. Memory does not have it after this restore; "
                    "if the step was drained, load(%d, source=directory) on %d ranks returns it",
                    how, named(gone), listed(sorted(lost), _NAMED), old.step, len(olds))  # fmt: skip
    if new and own:
        log.warning("%s: each rank had its own %s, and there was no %s: on the new ranks it stays as it is",
                    how, listed(sorted(own), _NAMED), named(new))  # fmt: skip


def protect(trainer: TrainerState, old: OpenCheckpoint, made: Resharded) -> None:
    """Commit what was put together, as a save of its own; then the old slots may be freed. Collective over the world.

    If that fails, it is a warning, and the old slots stay until a newer step is committed.
    """
    save = PendingSave(Snapshot(old.step, lambda: None), trainer.slots, trainer.ranks)
    assert made.slot.segment is not None
    save.take_over(made.slot, made.share, made.plan, made.slot.segment.inode)
    save.request.problem = None
    try:
        trainer.courier.call("commit_restored", save.request, old.restores, answers=save)
    except (Closed, DeadlineExceeded):
        raise
    except MlflashError as error:
        if trainer.ranks.rank in (0, error.rank):
            log.warning("the restored step has no redundancy among the ranks of this run: %s", error)
    old.close()


def only_shards_differ(state: Any, home: RankCheckpoint) -> bool:
    """Whether the state of this rank has other shards than its checkpoint, and can be put together from those."""
    flat = flatten_or_none(state)
    if flat is None:
        return False
    entries = home.manifest.entries
    live = _live_entries(state, flat, home.manifest.tree, entries)
    alike = tuple(_as_live(entry, live) for entry in entries)
    if all((a.offset, a.shape) == (b.offset, b.shape) for a, b in zip(alike, entries, strict=True)):
        return False
    return not compare(state, home.manifest.tree, alike)


def _live_entries(state: Any, flat: Flat, tree: Tree, entries: tuple[Entry, ...]) -> dict[str, Entry]:
    """The entries of the live tensors, and of those that optimizers will make like their parameters, by name."""
    live = {leaf.entry.name: leaf.entry for leaf in flat.leaves}
    for number, parameter in parameters(state, tree).items():
        entry, torch = entries[number], sys.modules["torch"]
        if entry.name not in live and is_like(entry, parameter):
            whole, offset, shape, mesh = place_of(parameter, entry.name)
            nbytes = math.prod(shape) * getattr(torch, entry.dtype).itemsize  # the saved one may have another dtype
            live[entry.name] = msgspec.structs.replace(entry, global_shape=whole, offset=offset, shape=shape,
                                                       nbytes=nbytes, mesh=mesh)  # fmt: skip
    return live


def _refuse_flat_shards(state: Any, old: OldRank, olds: OldRanks) -> None:
    """Refuse an optimizer's state whose shards are not marked as shards, if the parameters are now cut differently."""
    for number, parameter in parameters(state, old.tree).items():
        entry, shape = old.entries[number], tuple(parameter.shape)
        spots = olds.spots[entry.name]
        if entry.mesh is not None or not olds.is_private(spots) or has_shape_of(entry, parameter):
            continue
        # With use_orig_params, FSDP1 has a run of the elements of each parameter.
        is_run = len(entry.shape) == 1 and olds.elements(spots) == parameter.numel()
        if is_run or len(entry.shape) == len(shape):
            raise StructureMismatch(
                "each rank saved a shard of this tensor without its place in the whole, as FSDP1 does, and this "
                "run cuts the parameter differently: restore on the ranks that saved it, shard the model with "
                "fully_shard (FSDP2), or save what mlflash.adapters.fsdp.sharded_state_dict gives", tensor=entry.name,
                expected=f"a parameter of {list(entry.shape)}", found=list(shape),
            )  # fmt: skip


def _as_live(entry: Entry, live: Mapping[str, Entry]) -> Entry:
    """Return an entry of the checkpoint in the shard that the live tensor of its name has."""
    tensor = live.get(entry.name)
    same = (entry.kind, entry.dtype, entry.global_shape)
    return tensor if tensor is not None and (tensor.kind, tensor.dtype, tensor.global_shape) == same else entry


def _want(rank: int, opened: OpenCheckpoint, state: Any) -> _Wanted:
    """Work out what this rank's state is made of.

    Its structure is that of the old rank with its number, because objects (an optimizer before its first step) may not
    have theirs yet; its shards are those of the live tensors.
    """
    olds = opened.olds
    flat = flatten(state, unbegun=False)
    live = {leaf.entry.name: leaf for leaf in flat.leaves}
    like = olds.like(rank, flat.structure.entries)
    own = olds[like]
    _refuse_flat_shards(state, own, olds)
    live_entries = _live_entries(state, flat, own.tree, own.entries)
    entries = [_as_live(entry, live_entries) for entry in own.entries]
    if rank not in olds:  # what ranks do not have in common may have any shape here
        entries = [live_entries.get(e.name, e) if olds.is_private(olds.spots_of(e)) else e for e in entries]
    Comparison(state, own.tree, tuple(entries)).refuse()
    leaves: list[Leaf] = []
    starts: dict[int, int] = {}
    made_of: dict[int, Parts] = {}
    for number, (entry, before) in enumerate(zip(entries, own.entries, strict=True)):
        tie = starts.setdefault(before.start, number) if before.nbytes else number
        if msgspec.structs.replace(entries[tie], name=entry.name, start=entry.start) != entry:
            tie = number  # they were tied, but are different shards now
        value = live[entry.name].value if entry.name in live else None
        leaves.append(Leaf(msgspec.structs.replace(entry, start=0), value, -1 if tie == number else tie))
        if tie != number or not entry.nbytes:
            continue
        if entry.name not in live_entries and olds.is_sharded(olds.spots_of(entry)):
            raise StructureMismatch(
                "this tensor was saved in shards, and the state that you gave does not say which shard it needs: "
                "create the optimizer's state first (see mlflash.adapters.fsdp.init_optim_state)", tensor=entry.name,
            )  # fmt: skip
        parts = olds.parts(entry, rank)
        if parts is None and value is None:  # there is no live value that could stay
            parts = olds.parts(entry, like)
        if parts is not None:
            made_of[number] = parts
    paths = plain_leaves(own.tree)
    live_paths = plain_leaves(flat.structure.tree)
    values: list[Any] = [None] * len(paths)
    for path, at in paths.items():
        values[at] = flat.plain[live_paths[path]] if path in live_paths else own.plain[path]
    return _Wanted(Flat.of(leaves, own.tree, olds.merge_plain(values, paths, rank)), made_of)


def _make_rooms(wanted: _Wanted, plan: Plan, slot: Slot) -> dict[int, np.ndarray]:
    """Copy what the live state keeps into the new slot; return where the other leaves go in it, by number."""
    slot.unseal()
    slot.view[PAGE_NBYTES : PAGE_NBYTES + len(plan.manifest)] = np.frombuffer(plan.manifest, dtype=np.uint8)
    payload = slot.payload(plan.layout.extents)
    payload[:] = 0
    rooms: dict[int, np.ndarray] = {}
    for number, (entry, leaf) in enumerate(zip(plan.layout.entries, wanted.flat.leaves, strict=True)):
        room = payload[entry.start : entry.start + entry.nbytes]
        if number in wanted.made_of:
            rooms[number] = items(room, entry)
        elif leaf.tie < 0 and entry.nbytes and leaf.value is not None:
            room[:] = live_bytes(leaf.value)
    return rooms


def _parts_in(rooms: Mapping[int, np.ndarray], made_of: Mapping[int, Parts]) -> Iterator[WantedPart]:
    """Yield which parts of the checkpoint go where, as they are asked for: there may be very many."""
    for number, nth in _by_old_rank(made_of):
        part = made_of[number][nth]
        target = rooms[number][box(part.target, part.shape)]
        yield WantedPart(part.rank, part.number, part.source, part.shape, target)


def _by_old_rank(made_of: Mapping[int, Parts]) -> Iterator[tuple[int, int]]:
    """Yield leaves and their parts, all of one old rank after those of another: they are in one file."""
    if not made_of:
        return
    ranks = np.concatenate([parts.ranks for parts in made_of.values()])
    numbers = np.repeat(np.fromiter(made_of, dtype=np.int64), [len(parts) for parts in made_of.values()])
    nths = np.concatenate([np.arange(len(parts)) for parts in made_of.values()])
    order = np.argsort(ranks, kind="stable")
    for at in range(0, len(order), _PARTS):
        some = order[at : at + _PARTS]
        yield from zip(numbers[some].tolist(), nths[some].tolist(), strict=True)
