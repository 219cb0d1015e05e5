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
from ..memory.node_directory import FIRST_ON_DISK, NodeDirectory, is_on_disk
from ..memory.parity_layout import recoverable
from ..memory.slot import Attempt, Kind, Verdict
from ..mpi.world import World
from .certification import Saved

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
    # the places of the files of shared state, by number of the set and of the share; there may be several, which are
    # on disks only if none is in memory
    shares: Mapping[tuple[int, int], tuple[Place, ...]] = dataclasses.field(default_factory=dict)
    verdict: Verdict = Verdict.UNKNOWN

    def group_of(self, rank: int) -> ParityGroup | None:
        known = self.rebuilt.get(rank)
        return known or next((group for group in self.parity if rank in group.ranks), None)


def choose(stock: Inventory, node_of: Sequence[int], wanted: WantedStep = NEWEST, skip_stuck: int = 0,
           skip_suspect: bool = False) -> Choice | None:  # fmt: skip
    """Choose the newest attempt that has, for every rank, a slot or enough parity to rebuild it.

    It need not have been committed: an attempt that is sealed on all ranks rolls forward.

    Args:
        node_of: current node of each rank. A slot on the rank's own node is preferred, then one on the lowest node.
        skip_stuck: skip attempts that this many runs have restored, if there is an older one; 0: never.
    """
    newest: Choice | None = None
    for attempt, step, world_size in stock.attempts():
        if not wanted.fits_step(step) or (newest is not None and world_size != newest.world_size):
            continue
        files = stock.of(attempt)
        if not wanted.fits(step, files.verdict):
            continue
        choice = _sources(files, attempt, step, world_size, node_of)
        if choice is None:
            continue
        is_stuck = skip_stuck > 0 and choice.restores >= skip_stuck
        if not is_stuck and not (skip_suspect and choice.verdict is Verdict.SUSPECT):
            return choice
        newest = newest or choice
    return newest


def _sources(stock: Inventory, attempt: Attempt, step: int, world_size: int, node_of: Sequence[int]) -> Choice | None:
    """Where each rank's slot of an attempt is, or how to rebuild it. None if one cannot be obtained."""
    slots: dict[int, Place] = {}
    parity: dict[tuple[int, int], dict[int, Place]] = collections.defaultdict(dict)
    in_memory_first = stock.rows["file"] >= FIRST_ON_DISK
    rows = stock.rows[np.lexsort([stock.rows["file"], stock.rows["node"], in_memory_first, stock.rows["rank"]])]
    shares: dict[tuple[int, int], list[Place]] = {}
    columns = [rows[name].tolist() for name in ("rank", "node", "file", "group", "shared_by", "kind", "number")]
    is_share, is_parity, size = int(Kind.SHARE), int(Kind.PARITY), len(node_of)  # looked up once, not once per file
    for rank, node, file, group, set_of, kind, number in zip(*columns, strict=True):
        if kind == is_share:
            shares.setdefault((set_of, number), []).append((node, file))
            continue
        known = parity[group, number] if kind == is_parity else slots
        is_near = rank < size and node_of[rank] == node
        if rank not in known or (is_near and known[rank][0] != node and is_on_disk(known[rank][1]) == is_on_disk(file)):
            known[rank] = (node, file)
    groups = tuple(
        ParityGroup(stock.groups[number], losses, tuple(files.get(rank) for rank in stock.groups[number]))
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
    restores = int(stock.rows["restores"].max())
    source = tuple(slots.get(rank) for rank in range(world_size))
    places = {share: tuple(file for file in files if not is_on_disk(file[1])) or tuple(files)
              for share, files in shares.items()}  # fmt: skip
    return Choice(attempt, step, world_size, source, restores, rebuilt, groups, places, stock.verdict)


def _shares_complete(rows: np.ndarray, shares: Mapping[tuple[int, int], object]) -> bool:
    files = rows[rows["kind"] == Kind.SHARE]
    counts = dict(zip(files["shared_by"].tolist(), files["shares"].tolist(), strict=True))
    needed = set(rows["shared_by"].tolist()) - {-1}
    return all((number, share) in shares for number in needed for share in range(counts.get(number, 1)))


# What the memory of all nodes holds, and which part of it a run starts from. The result is the same on all ranks.


@dataclasses.dataclass(frozen=True)
class EarlierRuns:
    """What earlier runs left in memory."""

    stock: Inventory
    choice: Choice | None
    complete: Choice | None  # the newest that is complete, whatever its values are
    certified: Choice | None
    history: list[Saved]  # what these ranks can restore, the newest first
    newest: int  # the largest generation
    floor: int  # floor, unusable: see `CourierState`
    unusable: bool
    aside: set[int]  # numbers of this node's files that must not be touched


def scan_earlier_runs(config: Config, world: World, memory: NodeDirectory) -> EarlierRuns:
    """Find what earlier runs left, and what of it must not be touched. Collective over the world."""
    stock = take_stock(world, memory)
    newest = int(stock.rows["generation"].max(initial=0))
    skip_suspect, node_of = config.on_suspect == "keep", world.topology.node_of
    choice = choose(stock, node_of, skip_suspect=skip_suspect)
    floor, unusable = 0, False
    if choice is not None and not config.fresh:
        aside = _unreadable_and_newer(world, memory, choice.step)
    else:
        traces = find_traces(world, memory)
        floor = inventory.fresh_floor(traces, config.mark) if config.fresh else 0
        stock = stock.since(floor)
        choice = choose(stock, node_of, skip_suspect=skip_suspect)
        committed = inventory.committed_attempts(traces)
        unusable = choice is None and any(attempt.generation >= floor for attempt in committed)
        passed_over = [trace for trace in traces if config.fresh and trace.generation < floor]
        aside = {trace.place[1] for trace in (traces if unusable else passed_over)
                 if trace.place[0] == world.node_index}  # fmt: skip
        newest = max([newest, *(trace.generation for trace in traces)])
        steps = sorted({trace.step for trace in passed_over if trace.step >= 0})
        if world.rank == 0 and steps:
            log.warning("fresh start %r: steps %s in memory are passed over, and deleted after this run's first commit",
                        config.fresh, steps)  # fmt: skip
        if world.rank == 0 and config.fresh and choice is not None:
            log.info("fresh start %r was made before, and this run goes on from its step %d: another word begins anew",
                     config.fresh, choice.step)  # fmt: skip
    certified = choose(stock, node_of, WantedStep(certified=True))
    kept = (
        stock if not config.keeps_on_disk else Inventory(stock.rows[stock.rows["file"] >= FIRST_ON_DISK], stock.groups)
    )
    history = history_of(kept, node_of) if config.history else []
    return EarlierRuns(stock, choice, choose(stock, node_of), certified, history, newest, floor, unusable, aside)


def history_of(stock: Inventory, node_of: Sequence[int]) -> list[Saved]:
    """List what as many ranks as now have saved and can restore, one before the other, the newest first."""
    history: list[Saved] = []
    for attempt, step, world_size in stock.attempts():
        went_back = bool(history) and step >= history[-1].step  # training began again before it
        if world_size != len(node_of) or went_back:
            continue
        if _sources(stock.of(attempt), attempt, step, world_size, node_of) is not None:
            history.append(Saved(attempt, step))
    return history


def _unreadable_and_newer(world: World, memory: NodeDirectory, step: int) -> set[int]:
    """Find the files of this node that cannot be read and hold committed steps after this one."""
    newer: list[Trace] = []
    if world.local_rank == 0:
        traces = inventory.scan_traces(memory, world.node_index)
        newer = [trace for trace in traces if trace.committed and trace.damage and trace.step > step]
        if newer and world.rank == 0:
            log.warning("memory has steps that cannot be read (%s). They are newer than step %d, the newest that "
                        "memory can give, and are deleted when this run has committed a save. To get them back, end "
                        "this job before it saves, and start it with the version of mlflash that wrote them",
                        ", ".join(map(str, sorted({trace.step for trace in newer}))), step)  # fmt: skip
    return set(world.tell_node([trace.place[1] for trace in newer]))


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
