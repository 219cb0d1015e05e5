"""The parts of one rank's Checkpointer, made in order."""

from __future__ import annotations

import collections
import dataclasses
import logging
import os
from collections.abc import Sequence
from typing import Any

from ..config import Config
from ..errors import DeadlineExceeded, MemoryTooSmall, MlflashError
from ..memory import user_directory
from ..memory.commit_records import Trace
from ..memory.inventory import Choice, Inventory, assign, file_number, of_headers
from ..memory.node_directory import NodeMemory
from ..memory.slot import Slot
from ..memory.slot_header import Attempt, Kind
from ..memory.slot_pool import Shelf
from ..memory.thread_pool import Crew, crew_of
from ..placement import scheme
from ..placement.failure_domains import Domains, from_argument
from ..placement.failure_domains import join as join_domains
from ..placement.groups import Placement, made, place
from ..placement.scheme import Scheme
from ..placement.slurm_topology import ask_slurm, discover
from ..placement.survival import too_close
from ..redundancy import erasure, shares
from ..redundancy.protection import Protection
from ..redundancy.replicas import Replicas
from ..redundancy.shares import Share
from ..state.leaves import Flat, replica_ranks
from ..telemetry.events import EventLog, file_of_node
from ..telemetry.heartbeat import Pulse, read_pulses
from ..telemetry.journal import Journal
from ..telemetry.metrics import Metrics
from ..wire.rate_limit import Pace
from ..wire.rma_windows import Poke
from ..wire.world import World, check_torch_rank
from . import take_stock
from .grow_slots import make_room, needs_room

log = logging.getLogger("mlflash")

_NAMED = 3  # hosts or domains named in a warning


@dataclasses.dataclass
class Parts:
    """What save and restore work with.

    Attributes:
        domains: where the nodes stand, as far as that is known.
        journal: told what happens to this rank.
        crew: threads for copies and checks.
        pace: how fast the courier sends while training goes on.
        replicas: compares tensors between ranks that hold the same ones, where the user said so.
        run_id: random number of this run, the same on all ranks.
        generation: number of the newest attempt known; the next one is larger.
        rolled_forward: whether no rank saw the restored attempt committed: copies of it may never have been made.
        unhealed: the restored slot while its redundancy could not be made whole; the same on all ranks.
        restored_from: node whose memory held what this rank restored; "" before.
        restores: how many runs have restored the attempt that this one restored, itself included.
        counted: the attempt that this run was counted for.
        left_at: the step of this rank at which the ranks were last found to save different ones; None: never.
        floor: what is of a smaller generation is passed over: this run goes back to a fresh start.
        unusable: whether memory has what was committed, and cannot give it back as far as its headers tell.
        looked: whether a restore has said what there is: until then nothing that may be older and whole is given up.
        gives_way: whether the files that are left aside may be deleted where there is no room beside them.
    """

    config: Config
    world: World
    memory: NodeMemory
    protection: Protection
    domains: Domains | None
    shelf: Shelf
    journal: Journal
    crew: Crew
    pace: Pace
    replicas: Replicas | None = None
    run_id: bytes = b""
    generation: int = 0
    restored_from: str = ""
    rolled_forward: bool = False
    unhealed: Slot | None = None
    restores: int = 0
    counted: Attempt | None = None
    left_at: int | None = None
    floor: int = 0
    unusable: bool = False
    looked: bool = False
    gives_way: bool = False

    @property
    def domains_by_kind(self) -> dict[str, list[str]]:
        """For each kind of failure domain, innermost first, the name of each node's."""
        if self.domains is None:
            return {}
        nodes = [self.domains.names(name) for name in self.world.topology.node_names]
        return {kind: [names[level] for names in nodes] for level, kind in reversed([*enumerate(self.domains.kinds)])}

    @property
    def sharers(self) -> Replicas | None:
        """Who stores together what several ranks hold alike; None: each rank stores all of its own."""
        return None if self.replicas is None or self.replicas.sharing is None else self.replicas

    @property
    def shares(self) -> dict[int, Share]:
        """For each rank that shares state, the set and the number of its share."""
        return {} if self.replicas is None else self.replicas.shares

    def find_replicas(self, flat: Flat | None) -> None:
        """Look which ranks hold the same shards of DTensors as this one, where nobody said so.

        Collective over the world.

        Args:
            flat: the state; None: it cannot be read.
        """
        if self.replicas is not None or not self.config.share:
            return
        rank, losses = self.world.rank, _losses(self.protection.placement.scheme, self.world)
        nbytes: collections.Counter[tuple[int, ...]] = collections.Counter()
        for leaf in flat.leaves if flat is not None else ():
            if leaf.whole is not None and leaf.tie < 0:
                nbytes[self.world.from_torch(replica_ranks(leaf.whole))] += leaf.entry.nbytes
        useful = [ranks for ranks in sorted(nbytes) if rank in ranks]
        useful = [ranks for ranks in useful if shares.find(self.world.topology, ranks, rank, losses) is not None]
        mine = max(useful, key=lambda ranks: nbytes[ranks], default=(rank,))
        if self.world.agree([int(len(mine) == 1)])[0]:
            return
        named = self.world.gather((mine[0], len(mine), hash(mine)))
        alike = all(named[rank] == named[self.world.rank] for rank in mine)
        if not self.world.agree([int(alike)])[0]:
            return  # as with meshes that not all ranks are in: each stores its own
        self.replicas = Replicas(self.world, list(mine), placed=True)
        self.replicas.share(losses)

    def take_stock(self) -> Inventory:
        """List what all nodes hold, but for what a fresh start passes over. Collective over the world."""
        return take_stock.take(self.world, self.memory).since(self.floor)

    def find_traces(self) -> list[Trace]:
        """List the files that say of themselves that they hold something. Collective over the world."""
        return take_stock.traces(self.world, self.memory)

    def adopt(self, found: Inventory, choice: Choice | None) -> None:
        """Take over this node's files, keeping those of the choice from being written. Collective over the world."""
        world = self.world
        names: list[str] = self.world.tell_node(self.memory.slot_names() if world.local_rank == 0 else None)
        kept = choice.attempt if choice is not None else None
        same_ranks = choice is not None and choice.world_size == world.size
        placement = self.protection.placement
        inboxes = {rank: placement.inbox_of(rank) for rank in world.topology.ranks_on[world.node_index]}
        if kept is not None:  # it can be used after all
            self.shelf.aside -= set(found.on(world.node_index).of(kept).rows["file"].tolist())
        names = [name for name in names if file_number(name) not in self.shelf.aside]
        files, left_over = assign(found, names, world.node_index, kept, same_ranks, inboxes, self.shares,
                                  len(self.shelf.own))  # fmt: skip
        self.protection.close_windows()
        rows = found.on(world.node_index).of(kept).rows if kept is not None else found.rows[:0]
        # Shares may belong to no rank of today; nor do the slots of ranks of another world.
        foreign = (rows["kind"] == Kind.SHARE) | (not same_ranks)
        trusted, needed = set(rows["file"].tolist()), set(rows["file"][foreign].tolist())
        left_over = left_over if world.local_rank == 0 else []
        spare, kept_on = [n for n in left_over if n not in needed], [n for n in left_over if n in needed]
        kept_on += sorted(self.shelf.aside) if world.local_rank == 0 else []
        self.shelf.adopt(files[world.rank], kept, trusted, spare, kept_on)
        self.protection.open_windows(self.shelf)
        # No file is deleted or reused before every rank of the node has attached its own.
        world.agree([0])

    def make_room(self, demand: Sequence[tuple[Slot, int]], waiting: Sequence[Slot] = (), pairs: bool = True) -> None:
        """Make room in this rank's slots. Collective over the world.

        Slots that are busy are left alone: the main thread may be staging into one at this moment.

        Args:
            demand: slots and the bytes each must take.
            waiting: busy slots that the main thread waits for, and does not touch.
            pairs: also for the other inbox slot of each pair, which will be needed next.

        Raises:
            MemoryTooSmall: on all ranks; slots that hold a committed step are as they were.
        """
        wanted = {id(slot): (slot, nbytes) for slot, nbytes in demand}
        for pair in self.shelf.inbox.values() if pairs else ():
            size = max((wanted[id(slot)][1] for slot in pair if id(slot) in wanted), default=0)
            if size:
                wanted |= {id(slot): (slot, size) for slot in pair}
        self.protection.close_windows()
        try:
            with self.shelf.reserved([slot for slot, _ in wanted.values()]) as mine:
                usable = [(slot, n) for slot, n in wanted.values() if any(slot is m for m in (*waiting, *mine))]
                try:
                    make_room(self.world, self.memory, usable)
                except MemoryTooSmall:
                    if not self._give_way():
                        raise
                    make_room(self.world, self.memory, usable)
        finally:
            self.protection.open_windows(self.shelf)

    def leave_alone(self) -> None:
        """Leave every file that holds something as it is until a newer step is committed. Collective over the world."""
        self.unusable, self.gives_way = True, False
        here = self.world.node_index
        self.shelf.aside = {file for node, file in (one.place for one in self.find_traces()) if node == here}
        self.adopt(of_headers([], here), None)

    def _give_way(self) -> bool:
        """Delete what was passed over and left aside, where it may go; whether there was any. Collective."""
        if self.world.agree([int(not (self.gives_way and self.shelf.aside))])[0]:
            return False
        if self.world.rank == 0:
            log.warning("memory has no room for the slots of this run beside the checkpoints that are passed over: "
                        "these are deleted now, and not after its first commit")  # fmt: skip
        self.shelf.drop_aside()
        self.world.agree([0])  # what each node has now is counted after that
        return True

    def ensure_room(self, demand: Sequence[tuple[Slot, int]], waiting: Sequence[Slot] = (), pairs: bool = True) -> None:
        """Make room where any rank needs it. Collective over the world: one allreduce, as a rule.

        Raises:
            MemoryTooSmall: as `make_room`.
        """
        if not self.world.agree([int(not any(needs_room(slot, nbytes) for slot, nbytes in demand))])[0]:
            self.make_room(demand, waiting, pairs)

    def number_attempt(self, generation: int) -> Attempt:
        """Number an attempt as the ranks have agreed. Not collective."""
        self.generation = generation
        return Attempt(self.run_id, generation)

    def free(self) -> None:
        """Free windows, communicators and threads. Collective over the world."""
        self.crew.close()
        self.protection.free()
        if self.replicas is not None:
            self.replicas.free()
        self.world.free()


def make(config: Config, world: World, replicated: Any = None, domains: Any = None) -> Parts:
    """Connect the ranks, lock the job, look what earlier runs left, and take their files over.

    Collective over comm.

    Raises:
        ConfigError: on all ranks, where ``replicated`` or ``domains`` make no sense.
        JobInUse, UnsafePath, WorldMismatch: on all ranks, where any rank finds it so.
    """
    world.connect()
    held: list[NodeMemory] = []
    # One looks for all of a node: they must not end in two directories, whatever others do with their names meanwhile.
    top: str = world.tell_node(_claim(config) if world.local_rank == 0 else "")

    def hold() -> None:
        check_torch_rank(world)
        if scheme.parse(config.redundancy).parity:
            erasure.library()
        held.append(NodeMemory(config.memory, config.job, world.node_index if world.emulated else None, top=top))
        held[0].lock(world.local_rank, world.local_size)

    replicas: Replicas | None = None
    try:
        world.on_all(hold)
        if replicated is not None:
            replicas = Replicas(world, replicated)
        known = find_domains(world, config.domains if domains is None else domains)
    except BaseException as problem:
        for memory in held:
            memory.close()
        if isinstance(problem, MlflashError) and not isinstance(problem, DeadlineExceeded):  # the same on all ranks
            world.free()
        raise
    try:
        return _assemble(config, world, held[0], replicas, known)
    except BaseException:
        held[0].close()
        raise


def _assemble(
    config: Config, world: World, memory: NodeMemory, replicas: Replicas | None, known: Domains | None
) -> Parts:
    """Take over what earlier runs left. Collective over the world."""
    left = take_stock.look(config, world, memory)
    recorded = [group.ranks for group in left.choice.parity] if left.choice is not None else []
    standing = [] if known is None else [known.names(name) for name in world.topology.node_names]
    placement = place(world.topology, scheme.parse(config.redundancy), standing, recorded)
    if replicas is not None and config.share:
        replicas.share(_losses(placement.scheme, world))
    protection = Protection(world, config, placement)
    shelf = Shelf(memory, protection.owners, 3 if config.drain_every else 2)
    crew = crew_of(config.copy_threads, world.size if world.emulated else world.local_size, world.agree)
    pace = Pace(config.send_rate, config.max_slowdown, config.timeout_s)
    run_id: bytes = world.broadcast(os.urandom(16), 0)
    journal = world.on_all(lambda: _journal(config, world, memory, run_id.hex()[:8]))
    parts = Parts(config, world, memory, protection, known, shelf, journal, crew, pace, replicas, run_id)
    if protection.transport == "rma" and world.world is not None:
        world.poke = Poke(world)
    parts.generation, parts.floor, parts.unusable = left.newest, left.floor, left.unusable
    parts.gives_way, shelf.aside = not left.unusable, left.aside
    parts.adopt(left.found, left.choice)
    if world.rank == 0:
        _say_what_is_made(placement, len(world.topology.node_names))
    close = too_close(world.topology, placement, parts.domains_by_kind)
    if close and world.rank == 0:
        more = f" (and {len(close) - _NAMED} more)" if len(close) > _NAMED else ""
        log.warning("%s%s: if that is lost, memory cannot restore", "; ".join(close[:_NAMED]), more)
    return parts


def _claim(config: Config) -> str:
    """Find this user's directory, or make it; "" where that cannot be: each rank then sees why."""
    try:
        return user_directory.claim(config.memory, config.job)
    except (OSError, MlflashError):
        return ""


def _journal(config: Config, world: World, memory: NodeMemory, run: str) -> Journal:
    pulse = Pulse(memory, world.rank, world.size, world.local_rank, world.node_name, os.environ.get("MLFLASH_RUN", ""))
    file = file_of_node(config.log, world.node_index) if config.log else None
    events = EventLog(file, run=run, rank=world.rank, node=world.node_name)
    return Journal(world.rank, pulse, events, _metrics(config, world))


def _metrics(config: Config, world: World) -> Metrics | None:
    """Show the metrics of this node, where that is wanted: its first rank does."""
    if not config.metrics or world.local_rank:
        return None
    node = world.node_index if world.emulated else None
    return Metrics(config.metrics, config.job, lambda: read_pulses(config.memory, config.job, node))


def _say_what_is_made(placement: Placement, nodes: int) -> None:
    """Warn where there are too few nodes for what was asked."""
    asked, copied = placement.scheme, any(placement.partners)
    if asked.kind == "none":
        return
    if nodes == 1:
        log.warning("redundancy %r needs a second node: with this one alone nothing is protected", str(asked))
    elif nodes < asked.losses + (2 if asked.parity else 1) or (asked.parity and copied):
        log.warning("redundancy %r needs more nodes with as many ranks than there are here (%d): %s is made of it",
                    str(asked), nodes, made(placement))  # fmt: skip


def _losses(asked: Scheme, world: World) -> int:
    """How many nodes may be lost, as far as there are nodes for what was asked."""
    return min(asked.losses, len(world.topology.node_names) - 1)


def find_domains(world: World, given: Any) -> Domains | None:
    """Find out where the nodes stand: as given, else as Slurm tells each node, else as Slurm tells of all.

    Collective over the world.

    Args:
        given: see `failure_domains.from_argument`.

    Raises:
        ConfigError: on all ranks, where ``given`` makes no sense.
    """
    error: MlflashError | None = None
    found: Domains | None = None
    if world.rank == 0:  # one rank reads the file: the others must not see another version of it
        try:
            found = from_argument(given)
        except MlflashError as problem:
            error = problem
    world.raise_together(error)
    if given is None:
        own = discover(os.environ, world.node_name) if world.local_rank == 0 else None
        told = world.gather_nodes(own)
        found = join_domains(list(zip(world.topology.node_names, told, strict=True)))
        if found is None and world.rank == 0 and "SLURM_JOB_ID" in os.environ and len(told) > 2:
            found = ask_slurm()
    found = world.broadcast(found, 0)
    unknown = [] if found is None else [name for name in world.topology.node_names if not found.knows(name)]
    if unknown and given is not None and world.rank == 0:
        log.warning("nothing is said of the failure domains of %s: each counts as one of its own",
                    ", ".join(unknown[:_NAMED]) + (" and others" if len(unknown) > _NAMED else ""))  # fmt: skip
    return found
