"""What the memory of all nodes holds, and which part of it a run starts from. The result is the same on all ranks."""

from __future__ import annotations

import dataclasses
import logging

from ..config import Config
from ..memory import commit_records
from ..memory.commit_records import Trace
from ..memory.inventory import Inventory, decode, encode, join, scan
from ..memory.node_directory import NodeDirectory
from ..memory.wanted_step import WantedStep
from ..mpi.world import World
from .choose_checkpoint import Choice, choose

log = logging.getLogger("mlflash")


@dataclasses.dataclass(frozen=True)
class EarlierRuns:
    """What earlier runs left in memory.

    Attributes:
        found, choice: what may be restored, and what would be restored, according to headers.
        whole: the newest complete attempt, whatever its values are.
        certified: the newest certified attempt.
        newest: the largest generation.
        floor, unusable: see `Context`.
        aside: numbers of this node's files that must not be touched.
    """

    found: Inventory
    choice: Choice | None
    whole: Choice | None
    newest: int
    floor: int = 0
    unusable: bool = False
    aside: set[int] = dataclasses.field(default_factory=set)
    certified: Choice | None = None


def look(config: Config, world: World, memory: NodeDirectory) -> EarlierRuns:
    """Find what earlier runs left, and what of it must not be touched. Collective over the world."""
    found = take(world, memory)
    newest = int(found.rows["generation"].max(initial=0))
    keeps, node_of = config.on_suspect == "keep", world.topology.node_of
    choice, whole = choose(found, node_of, skip_suspect=keeps), choose(found, node_of)
    if choice is not None and not config.fresh:
        certified = choose(found, node_of, WantedStep(certified=True))
        aside = _unreadable_and_newer(world, memory, choice.step)
        return EarlierRuns(found, choice, whole, newest, aside=aside, certified=certified)
    found_traces = traces(world, memory)
    floor = commit_records.floor(found_traces, config.mark) if config.fresh else 0
    generations = {one.place: -1 if one.attempt is None else one.attempt.generation for one in found_traces}
    choice, whole = choose(found.since(floor), node_of, skip_suspect=keeps), choose(found.since(floor), node_of)
    unusable = choice is None and any(one.generation >= floor for one in commit_records.committed(found_traces))
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
    """Find the files of this node that cannot be read and hold committed steps after this one.

    Collective over the node. Another version of mlflash may have written them, and can still restore them.
    """
    newer: list[Trace] = []
    if world.local_rank == 0:
        its = commit_records.trace(memory, world.node_index)
        newer = [one for one in its if one.committed and one.damage and one.step > step]
        if newer and world.rank == 0:
            log.warning("memory has steps that cannot be read (%s). They are newer than step %d, the newest that "
                        "memory can give, and are deleted when this run has committed a save. To get them back, end "
                        "this job before it saves, and start it with the version of mlflash that wrote them",
                        ", ".join(map(str, sorted({one.step for one in newer}))), step)  # fmt: skip
    return set(world.tell_node([one.place[1] for one in newer]))


def traces(world: World, memory: NodeDirectory) -> list[Trace]:
    """List the files of all nodes whose headers say that they hold something. Collective over the world."""
    mine = commit_records.encode(commit_records.trace(memory, world.node_index)) if world.local_rank == 0 else None
    return commit_records.join(world.gather_nodes(mine))


def take(world: World, memory: NodeDirectory) -> Inventory:
    """List what all nodes hold. Collective over the world."""
    packed = world.gather_nodes(encode(scan(memory, world.node_index)) if world.local_rank == 0 else None)
    return join([decode(part) for part in packed])
