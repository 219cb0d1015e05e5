"""Chooses which attempt to restore and from where, by what the nodes hold. Pure: every rank makes the same choice."""

from __future__ import annotations

import collections
import dataclasses
import logging
import pickle
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from ..config import Config
from ..memory import inventory
from ..memory.inventory import NEWEST, Inventory, Place, Trace, WantedStep
from ..memory.node_directory import NodeDirectory
from ..memory.parity_layout import recoverable
from ..memory.slot import Attempt, Kind, Verdict
from ..mpi.world import World

log = logging.getLogger("mlflash")


@dataclasses.dataclass(frozen=True)
class ParityGroup:
    """The existing parity files of a group, for one attempt."""

    ranks: tuple[int, ...]
    losses: int  # how many of them may be lost
    files: tuple[Place | None, ...]  # for each of these ranks, the place of its parity; None: lost


@dataclasses.dataclass(frozen=True)
class Choice:
    """An attempt that can be restored."""

    attempt: Attempt
    step: int
    world_size: int
    source: tuple[Place | None, ...]  # for each rank, the place of its slot; None: the slot must be rebuilt
    restores: int = 0
    rebuilt: Mapping[int, ParityGroup] = dataclasses.field(default_factory=dict)  # of each rank that must be rebuilt
    parity: tuple[ParityGroup, ...] = ()
    # the places of the files of shared state, by number of the set and of the share; there may be several
    shares: Mapping[tuple[int, int], tuple[Place, ...]] = dataclasses.field(default_factory=dict)
    verdict: Verdict = Verdict.UNKNOWN

    def group_of(self, rank: int) -> ParityGroup | None:
        known = self.rebuilt.get(rank)
        return known or next((group for group in self.parity if rank in group.ranks), None)


def choose(found: Inventory, node_of: Sequence[int], wanted: WantedStep = NEWEST, skip_stuck: int = 0,
           skip_suspect: bool = False) -> Choice | None:  # fmt: skip
    """Choose the newest attempt that has, for every rank, a slot or enough parity to rebuild it.

    It need not have been committed: an attempt that is sealed on all ranks rolls forward.

    Args:
        node_of: current node of each rank. A slot on the rank's own node is preferred, then one on the lowest node.
        skip_stuck: skip attempts that this many runs have restored, if there is an older one; 0: never.
    """
    newest: Choice | None = None
    for attempt, its_step, world_size in found.attempts():
        if not wanted.fits_step(its_step) or (newest is not None and world_size != newest.world_size):
            continue
        its = found.of(attempt)
        if not wanted.fits(its_step, its.verdict):
            continue
        choice = _sources(its, attempt, its_step, world_size, node_of)
        if choice is None:
            continue
        is_stuck = skip_stuck > 0 and choice.restores >= skip_stuck
        if not is_stuck and not (skip_suspect and choice.verdict is Verdict.SUSPECT):
            return choice
        newest = newest or choice
    return newest


def _sources(found: Inventory, attempt: Attempt, step: int, world_size: int, node_of: Sequence[int]) -> Choice | None:
    """Where each rank's slot of an attempt is, or how to rebuild it. None if one cannot be obtained."""
    slots: dict[int, Place] = {}
    parity: dict[tuple[int, int], dict[int, Place]] = collections.defaultdict(dict)
    rows = found.rows[np.lexsort([found.rows[name] for name in ("file", "node", "rank")])]
    shares: dict[tuple[int, int], list[Place]] = {}
    columns = [rows[name].tolist() for name in ("rank", "node", "file", "group", "shared_by", "kind", "number")]
    is_share, is_parity, size = int(Kind.SHARE), int(Kind.PARITY), len(node_of)  # looked up once, not once per file
    for rank, node, file, group, set_of, kind, number in zip(*columns, strict=True):
        if kind == is_share:
            shares.setdefault((set_of, number), []).append((node, file))
            continue
        known = parity[group, number] if kind == is_parity else slots
        if rank not in known or (rank < size and node_of[rank] == node and known[rank][0] != node):
            known[rank] = (node, file)
    groups = tuple(
        ParityGroup(found.groups[number], losses, tuple(files.get(rank) for rank in found.groups[number]))
        for (number, losses), files in parity.items()
    )
    rebuilt: dict[int, ParityGroup] = {}
    if missing := set(range(world_size)) - slots.keys():
        for group in groups:
            no_slot = [nth for nth, rank in enumerate(group.ranks) if rank in missing]
            if not no_slot:
                continue
            no_parity = [nth for nth, place in enumerate(group.files) if place is None]
            if recoverable(len(group.ranks), group.losses, no_slot, no_parity):
                rebuilt |= {group.ranks[nth]: group for nth in no_slot if group.ranks[nth] not in rebuilt}
    if missing - rebuilt.keys() or not _shares_complete(rows, shares):
        return None
    restores = int(found.rows["restores"].max())
    source = tuple(slots.get(rank) for rank in range(world_size))
    places = {share: tuple(found) for share, found in shares.items()}
    return Choice(attempt, step, world_size, source, restores, rebuilt, groups, places, found.verdict)


def _shares_complete(rows: np.ndarray, shares: Mapping[tuple[int, int], object]) -> bool:
    files = rows[rows["kind"] == Kind.SHARE]
    counts = dict(zip(files["shared_by"].tolist(), files["shares"].tolist(), strict=True))
    needed = set(rows["shared_by"].tolist()) - {-1}
    return all((number, share) in shares for number in needed for share in range(counts.get(number, 1)))


# What the memory of all nodes holds, and which part of it a run starts from. The result is the same on all ranks.


@dataclasses.dataclass(frozen=True)
class EarlierRuns:
    """What earlier runs left in memory."""

    found: Inventory
    choice: Choice | None
    whole: Choice | None  # the newest complete attempt, whatever its values are
    newest: int
    floor: int = 0  # floor, unusable: see `CourierState`
    unusable: bool = False
    aside: set[int] = dataclasses.field(default_factory=set)  # numbers of this node's files that must not be touched
    certified: Choice | None = None


def look_at_earlier_runs(config: Config, world: World, memory: NodeDirectory) -> EarlierRuns:
    """Find what earlier runs left, and what of it must not be touched. Collective over the world."""
    found = take_stock(world, memory)
    newest = int(found.rows["generation"].max(initial=0))
    keeps, node_of = config.on_suspect == "keep", world.topology.node_of
    choice, whole = choose(found, node_of, skip_suspect=keeps), choose(found, node_of)
    if choice is not None and not config.fresh:
        certified = choose(found, node_of, WantedStep(certified=True))
        aside = _unreadable_and_newer(world, memory, choice.step)
        return EarlierRuns(found, choice, whole, newest, aside=aside, certified=certified)
    found_traces = find_traces(world, memory)
    floor = inventory.fresh_floor(found_traces, config.mark) if config.fresh else 0
    generations = {one.place: -1 if one.attempt is None else one.attempt.generation for one in found_traces}
    choice, whole = choose(found.since(floor), node_of, skip_suspect=keeps), choose(found.since(floor), node_of)
    unusable = choice is None and any(one.generation >= floor for one in inventory.committed_attempts(found_traces))
    aside = {file for (node, file), generation in generations.items()
             if node == world.node_index and (unusable or (config.fresh and generation < floor))}  # fmt: skip
    newest = max(newest, *generations.values(), 0)
    if config.fresh and world.rank == 0:
        before = sorted({one.step for one in found_traces if one.step >= 0 and generations[one.place] < floor})
        if before:
            log.warning("fresh start %r: steps %s in memory are passed over, and deleted after this run's first commit",
                        config.fresh, before)  # fmt: skip
        if choice is not None:
            log.info("fresh start %r was made before, and this run goes on from its step %d: another word begins anew",
                     config.fresh, choice.step)  # fmt: skip
    return EarlierRuns(found.since(floor), choice, whole, newest, floor, unusable, aside,
                       choose(found.since(floor), node_of, WantedStep(certified=True)))  # fmt: skip


def _unreadable_and_newer(world: World, memory: NodeDirectory, step: int) -> set[int]:
    """Find the files of this node that cannot be read and hold committed steps after this one."""
    newer: list[Trace] = []
    if world.local_rank == 0:
        traces = inventory.scan_traces(memory, world.node_index)
        newer = [one for one in traces if one.committed and one.damage and one.step > step]
        if newer and world.rank == 0:
            log.warning("memory has steps that cannot be read (%s). They are newer than step %d, the newest that "
                        "memory can give, and are deleted when this run has committed a save. To get them back, end "
                        "this job before it saves, and start it with the version of mlflash that wrote them",
                        ", ".join(map(str, sorted({one.step for one in newer}))), step)  # fmt: skip
    return set(world.tell_node([one.place[1] for one in newer]))


def find_traces(world: World, memory: NodeDirectory) -> list[Trace]:
    """List the files of all nodes whose headers say that they hold something. Collective over the world."""
    packed = None  # 2,400 bytes for each header, and a third of that when it is compressed
    if world.local_rank == 0:
        packed = zlib.compress(pickle.dumps(inventory.scan_traces(memory, world.node_index)), 1)
    return [trace for packed_of_node in world.gather_nodes(packed) for trace in
            pickle.loads(zlib.decompress(packed_of_node))]  # fmt: skip  # safe: from ranks of this job


def take_stock(world: World, memory: NodeDirectory) -> Inventory:
    """List what all nodes hold. Collective over the world."""
    own = inventory.encode(inventory.scan(memory, world.node_index)) if world.local_rank == 0 else None
    return inventory.join([inventory.decode(packed) for packed in world.gather_nodes(own)])
