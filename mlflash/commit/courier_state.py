"""The state of one rank's Checkpointer on the courier's side, with what saving and restoring do with its slots."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from ..channel.records import Trainer
from ..config import Config
from ..crash_points import reach
from ..errors import MemoryTooSmall, MlflashError
from ..memory import shared_memory_segment
from ..memory.copy_threads import CopyThreads
from ..memory.inventory import Inventory, Trace, of_headers
from ..memory.memory_limits import available, headroom, other_files
from ..memory.node_directory import NodeDirectory, file_number
from ..memory.slot import Attempt, Kind, Slot, Use, Verdict
from ..memory.slot_pool import SlotPool, assign, unmap
from ..mpi.nonblocking import Operation, SendRate
from ..mpi.world import World
from ..placement.failure_domains import Domains
from ..placement.redundancy import Scheme
from ..protect import deduplication
from ..protect.deduplication import Share, Shareable, ShareableLeaf, SharingNews
from ..protect.protection import Protection
from ..protect.replicated_tensors import ReplicatedTensors
from ..protect.value_checks import Examiner
from ..state.layout import PAGE_NBYTES, round_up
from ..telemetry.recorder import CourierRecorder
from .certification import Certification
from .earlier_runs import Choice, find_traces, take_stock

log = logging.getLogger("mlflash")

T = TypeVar("T")

_FILES_NAMED = 3  # kinds of files of others that an error names


@dataclasses.dataclass
class Left:
    """What earlier runs have left in memory, according to headers."""

    step: int | None = None
    attempt: Attempt | None = None  # the newest of as many ranks as now
    unusable: bool = False  # whether there is a committed step that cannot be restored


@dataclasses.dataclass
class Restored:
    """What this run has restored last."""

    source: str = ""  # the node whose memory had the state of this rank, or how it was made; "" before a restore
    rolled_forward: bool = False  # whether no rank saw its commit: its copies may never have been made
    restores: int = 0  # how many runs have restored it, including this one
    verdict: Verdict = Verdict.UNKNOWN
    counted: Attempt | None = None  # the attempt in whose slot that number was written


@dataclasses.dataclass
class CourierState:
    """What saving and restoring work with.

    Attributes:
        replicas: compares tensors between ranks that hold the same ones, if the user said that they do.
        unprotected: the restored slot, as long as its redundancy could not be restored; the same on all ranks.
        has_searched: whether a restore has found out what exists. Until then no older attempt is given up, as it may
            be the only intact one.
    """

    config: Config
    world: World
    memory: NodeDirectory
    protection: Protection
    domains: Domains | None
    pool: SlotPool
    recorder: CourierRecorder
    copy_threads: CopyThreads
    pace: SendRate
    examiner: Examiner
    certification: Certification
    replicas: ReplicatedTensors | None = None
    run_id: bytes = b""
    generation: int = 0  # number of the newest known attempt; the next one is larger
    restored: Restored = dataclasses.field(default_factory=Restored)
    unprotected: Slot | None = None
    diverged_step: int | None = None  # its own when the ranks last were found to save different steps; None: never
    floor: int = 0  # attempts with a smaller generation are skipped, because this run goes back to a fresh start
    left: Left = dataclasses.field(default_factory=Left)
    has_searched: bool = False
    gives_way: bool = False  # whether files that were left aside may be deleted to make room
    damaged: bool = False  # whether the scrubber has found damage here that can perhaps be repaired
    trainer: Trainer | None = None
    kept_s: float = -math.inf  # when the history got a step last (time.monotonic)
    _reported: SharingNews = dataclasses.field(default_factory=SharingNews)  # what the trainer knows of it

    @property
    def domains_by_kind(self) -> dict[str, list[str]]:
        """For each kind of failure domain, innermost first, the domain of each node."""
        if self.domains is None:
            return {}
        nodes = [self.domains.names(name) for name in self.world.topology.node_names]
        return {kind: [names[level] for names in nodes] for level, kind in reversed([*enumerate(self.domains.kinds)])}

    @property
    def sharers(self) -> ReplicatedTensors | None:
        """The ranks that together store what they hold alike; None: each rank stores all of its state."""
        return None if self.replicas is None or self.replicas.sharing is None else self.replicas

    @property
    def shares(self) -> dict[int, Share]:
        return {} if self.replicas is None else self.replicas.shares

    @property
    def may_keep(self) -> bool:
        """Whether the history may get the next step, as far as this rank knows."""
        config = self.config
        is_due = self.world.rank > 0 or time.monotonic() - self.kept_s >= config.history_every_s
        return config.history > 0 and is_due and (self.pool.keeps or not config.keeps_on_disk)

    def keep_on_disk(self, *sources: Slot) -> bool:
        """Write this rank's slot, and its share, to the disk, if the history is there. Not collective.

        Returns whether all of it is there, or need not be.
        """
        pool = self.pool
        for source in sources:
            header = source.header
            if not pool.kept or header is None or pool.is_kept(header):
                continue
            if not pool.keeps or (target := pool.free_kept(header.kind)) is None:
                return False
            target.unseal()
            self.world.drive([_end_of(is_stored := target.store(source))])
            if is_stored():
                target.seal(header)
            if target.header is None:
                return False
            reach("keep.sealed")
        return True

    def find_replicas(self, held: Mapping[tuple[int, ...], int]) -> None:
        """Find the ranks that hold the same shards of DTensors as this one, if the user did not name them."""
        if self.replicas is not None or not self.config.share:
            return
        rank, losses = self.world.rank, losses_of(self.protection.placement.scheme, self.world)
        useful = [ranks for ranks in sorted(held) if rank in ranks]
        useful = [ranks for ranks in useful if deduplication.find(self.world.topology, ranks, rank, losses) is not None]
        sharers = max(useful, key=lambda ranks: held[ranks], default=(rank,))
        if self.world.all_of(len(sharers) == 1):
            return
        named = self.world.gather((sharers[0], len(sharers), hash(sharers)))
        alike = all(named[rank] == named[self.world.rank] for rank in sharers)
        if not self.world.all_of(alike):
            return  # for example with meshes that do not have all ranks: each rank stores all of its state
        self.replicas = ReplicatedTensors(self.world, sharers, placed=True)
        self.replicas.share(losses)

    def settle_shared(self, held: Mapping[tuple[int, ...], int], trainer: Shareable) -> None:
        """Agree on what is shared of a state that is not saved yet. Collective over the world.

        Raises on all ranks what the trainer of any rank raises.
        """
        self.find_replicas(held)
        if (replicas := self.sharers) is None:
            return
        problem: MlflashError | None = None

        def ask(question: Callable[[], T], otherwise: T) -> T:
            nonlocal problem
            try:
                return question()
            except MlflashError as error:  # the other ranks must know, too
                problem = problem or error
                return otherwise

        leaves: Sequence[ShareableLeaf] = ask(trainer.shareable, [])
        replicas.settle(leaves, lambda keys: ask(lambda: trainer.digests(keys), {}), problem is None)
        self.world.raise_together(problem)

    @property
    def sharing(self) -> SharingNews:
        replicas = self.sharers
        return SharingNews() if replicas is None else SharingNews(replicas.sharing, replicas.agreed, replicas.version)

    def tell_trainer(self) -> None:
        """Tell the trainer what has changed: files of its slots, what is shared, whether slots are held back."""
        if self.trainer is not None:
            sharing = self.sharing
            news = None if sharing == self._reported else sharing
            self.trainer.update(self.pool.news(), self.pool.has_free, news, self.unprotected is not None)
            self._reported = sharing

    def reserve(self, nbytes: int, share_nbytes: int, is_first: bool) -> None:
        """Make slots of at least a given size, and those for their redundancy. Collective over the world.

        ``is_first``: nothing was saved or restored before. Raises MemoryTooSmall on all ranks if a node has no room.
        """
        pool = self.pool
        sizes = self.protection.inbox_nbytes(self.world.gather(nbytes))
        demand = [(slot, nbytes) for slot in pool.own]
        demand += [(slot, share_nbytes) for slot in pool.shares if share_nbytes]
        demand += [(slot, sizes[owner]) for owner, pair in pool.inbox.items() for slot in pair]
        if is_first and not self.has_searched:  # the newest attempt may be damaged, and an older one may be needed
            demand = [(slot, size) for slot, size in demand if slot.header is None]
        self.make_room(demand, pairs=False)

    def take_stock(self) -> Inventory:
        """List what all nodes hold, without what a fresh start skips. Collective over the world."""
        return take_stock(self.world, self.memory).since(self.floor)

    def find_traces(self) -> list[Trace]:
        """List the files whose headers say that they hold something. Collective over the world."""
        return find_traces(self.world, self.memory)

    def adopt(self, stock: Inventory, choice: Choice | None) -> None:
        """Take over this node's files, and protect those of the choice from saves. Collective over the world."""
        world = self.world
        names: list[str] = self.world.tell_node(self.memory.slot_names() if world.local_rank == 0 else None)
        chosen = choice.attempt if choice is not None else None
        files = stock.on(world.node_index)
        rows = files.of(chosen).rows if chosen is not None else files.rows[:0]
        same_ranks = choice is not None and choice.world_size == world.size
        placement = self.protection.placement
        inboxes = {rank: placement.inbox_of(rank) for rank in world.topology.ranks_on[world.node_index]}
        trusted = set(rows["file"].tolist())
        self.pool.aside -= trusted  # some were left aside, but can be used after all
        names = [name for name in names if file_number(name) not in self.pool.aside]
        assigned, left_over = assign(files, names, chosen, same_ranks, inboxes, self.shares,
                                     len(self.pool.own), self.config.slots.copies, self.pool.older(),
                                     self.pool.has_disk, self.pool.copied, len(self.pool.kept))  # fmt: skip
        self.protection.close_windows()
        # Shares, and slots of ranks of another world, may belong to no rank of this run.
        foreign = (rows["kind"] == Kind.SHARE) | (not same_ranks)
        needed = set(rows["file"][foreign].tolist())
        left_over = left_over if world.local_rank == 0 else []
        spare, kept_on = [n for n in left_over if n not in needed], [n for n in left_over if n in needed]
        kept_on += sorted(self.pool.aside) if world.local_rank == 0 else []
        self.pool.adopt(assigned[world.rank], chosen, trusted, spare, kept_on)
        self.protection.open_windows(self.pool)
        # No file is deleted or reused before every rank of the node has attached its own.
        world.barrier()

    def make_room(self, demand: Sequence[tuple[Slot, int]], waiting: Sequence[Slot] = (), pairs: bool = True,
                  made: Callable[[], None] = lambda: None) -> None:  # fmt: skip
        """Make room in this rank's slots. Collective over the world.

        Busy slots are left alone, because the trainer may be staging into one right now.

        Args:
            waiting: leased slots that the trainer waits for and does not touch.
            pairs: also enlarge the other inbox slot of each pair, which is needed next.
            made: called as soon as those have room, before the others are made. It must not raise anything.

        Raises:
            MemoryTooSmall: on all ranks; slots that hold a committed step are unchanged.
        """
        wanted = {id(slot): (slot, nbytes) for slot, nbytes in demand}
        for pair in self.pool.inbox.values() if pairs else ():
            size = max((wanted[id(slot)][1] for slot in pair if id(slot) in wanted), default=0)
            if size:
                wanted |= {id(slot): (slot, size) for slot in pair}
        self.protection.close_windows()
        try:
            with self.pool.reserved([*wanted.values()]) as reserved:
                first, then = ([(slot, n) for slot, n in wanted.values() if any(slot is other for other in slots)]
                               for slots in (waiting, reserved))  # fmt: skip
                self._or_give_way(lambda: check_room(self.world, self.memory, first + then))
                self._or_give_way(lambda: grow_slots(self.world, self.memory, first))
                made()
                self._or_give_way(lambda: grow_slots(self.world, self.memory, then))
        finally:
            self.tell_trainer()
            self.protection.open_windows(self.pool)

    def leave_alone(self) -> None:
        """Leave every file that holds something alone until a newer step is committed. Collective over the world."""
        self.left.unusable, self.gives_way = True, False
        own_node = self.world.node_index
        self.pool.aside = {file for node, file in (trace.place for trace in self.find_traces()) if node == own_node}
        self.adopt(of_headers([], own_node), None)

    def _or_give_way(self, work: Callable[[], None]) -> None:
        """Do something that needs memory; if there is too little, delete what was skipped and left aside, if allowed.

        Collective over the world.
        """
        try:
            work()
        except MemoryTooSmall:
            if not self.world.any_of(self.gives_way and self.pool.aside):
                raise
            if self.world.rank == 0:
                log.warning("memory has no room for the slots of this run and for the checkpoints that are passed "
                            "over: these checkpoints are deleted now, and not after the first commit")  # fmt: skip
            self.pool.drop_aside()
            self.world.barrier()  # only then does each node count its free memory
            work()

    def ensure_room(self, demand: Sequence[tuple[Slot, int]], waiting: Sequence[Slot] = (), pairs: bool = True) -> None:
        """Make room if any rank needs it, like `make_room`. Collective over the world; usually a single allreduce."""
        if self.world.any_of(any(needs_room(slot, nbytes) for slot, nbytes in demand)):
            self.make_room(demand, waiting, pairs)

    def free(self) -> None:
        self.copy_threads.close()
        self.protection.close_windows()
        if self.replicas is not None:
            self.replicas.free()
        self.world.free()


def _end_of(is_stored: Callable[[], bool | None]) -> Operation:
    while is_stored() is None:
        yield False


def losses_of(asked: Scheme, world: World) -> int:
    """How many nodes may be lost, limited by the number of nodes of the job."""
    return min(asked.losses, len(world.topology.node_names) - 1)


# Larger slots: larger files, or an error before anything is allocated if a node lacks memory


def needs_room(slot: Slot, nbytes: int) -> bool:
    """Whether a slot needs a larger file for ``nbytes``, or another one because somebody has removed its own."""
    return slot.use is not Use.HOLDS and not slot.drains and slot.lacks(nbytes) and not slot.is_lent


def check_room(world: World, memory: NodeDirectory, demand: Sequence[tuple[Slot, int]]) -> None:
    """Fail before anything is allocated if a node has no room for larger files of some slots.

    Collective over the world. Raises MemoryTooSmall on all ranks, with the numbers of the node that lacks memory.
    """
    asked = sum(nbytes - slot.view.nbytes for slot, nbytes in _missing(demand))
    asked = asked if world.node is None else sum(world.gather(asked, world.node))

    def check() -> None:
        free = available(memory.path)
        what, least = min(free.items(), key=lambda item: item[1])
        spared = headroom(asked)
        if asked and asked + spared > least:
            raise MemoryTooSmall(
                "the slots of this node do not fit into its memory: save less, use fewer ranks per node or a scheme "
                "that needs less memory, or raise the limit named below (/dev/shm: mount -o remount,size=...; in a "
                "container --shm-size; in a pod sizeLimit of its emptyDir)",
                expected=f"{asked:,} bytes more for the slots of {world.local_size} ranks, and {spared:,} bytes to "
                "spare",
                found=f"{least:,} bytes: {what}" + _others(memory),
            )

    world.on_all(check)


def grow_slots(world: World, memory: NodeDirectory, demand: Sequence[tuple[Slot, int]]) -> None:
    """Give slots larger files. Collective over the world; raises MemoryTooSmall on all ranks.

    A slot that holds a committed step must not be among them.
    """
    todo = _missing(demand)

    def create() -> None:
        try:
            for slot, nbytes in todo:
                reach("room.begun")
                old, slot.segment = slot.segment, None  # mapped until `grow` has checked that the file is still its own
                unmap(slot)  # a free slot holds nothing that is still needed
                if old is None:
                    slot.segment = shared_memory_segment.create(memory, nbytes)
                else:
                    slot.segment = shared_memory_segment.grow(memory, old, nbytes)
                reach("room.created")
        finally:  # even if another rank found no room: the new files stay and will be used
            shared_memory_segment.prefault_in_background([slot.segment for slot, _ in todo if slot.segment is not None])

    world.on_all(create)


def _missing(demand: Sequence[tuple[Slot, int]]) -> list[tuple[Slot, int]]:
    """The slots that need larger files, with their bytes."""
    return [(slot, round_up(nbytes, PAGE_NBYTES)) for slot, nbytes in demand if needs_room(slot, nbytes)]


def _others(memory: NodeDirectory) -> str:
    jobs = "".join(f"\n    {job}: {nbytes:,} bytes" for job, nbytes in memory.other_jobs().items())
    files = "".join(f"\n    {kind}" for kind in other_files(memory.memory)[:_FILES_NAMED])
    return (f"; other jobs of yours hold slots here (`mlflash clean JOB` frees those of a dead one):{jobs}" * bool(jobs)
            + f"; this is not mlflash's (what a killed job has left may be deleted):{files}" * bool(files))  # fmt: skip
