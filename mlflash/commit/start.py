"""Makes everything that one rank's courier works with, in order and on all ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from ..config import Config
from ..errors import ConfigError, DeadlineExceeded, MlflashError, text_of
from ..memory.copy_threads import as_many_as_help
from ..memory.disk_slot import Disk
from ..memory.memory_limits import slow_kind
from ..memory.node_directory import NodeDirectory, claim_user_directory
from ..memory.slot_pool import SlotPool
from ..mpi.fabric import Poke
from ..mpi.nonblocking import SendRate
from ..mpi.world import World
from ..placement import redundancy
from ..placement.failure_domains import Domains, ask_slurm, discover, from_argument
from ..placement.failure_domains import join as join_domains
from ..placement.redundancy import Placement, made, place
from ..placement.survival import too_close
from ..protect import erasure_codes
from ..protect.protection import Protection
from ..protect.replicated_tensors import ReplicatedTensors
from ..protect.value_checks import Examiner
from ..telemetry.heartbeat import CourierHeartbeat, RankFacts
from ..telemetry.metrics import targets_of
from ..telemetry.otlp import Exporter
from ..telemetry.recorder import CourierRecorder, EventLog, file_of_node
from ..text import LIGHT, listed
from .certification import Certification, Saved
from .courier_state import CourierState, losses_of
from .earlier_runs import scan_earlier_runs

log = logging.getLogger("mlflash")

_NAMED = 3  # hosts or domains named in a warning


def make(config: Config, world: World, problem: MlflashError | None = None,
         replicas: tuple[Sequence[int], Sequence[str]] | None = None, domains: Any = None, start: str = "",
         trains_on: frozenset[int] = frozenset()) -> CourierState:  # fmt: skip
    """Connect the ranks, lock the job, find what earlier runs left, and take their files over. Collective.

    Args:
        replicas: the ranks that hold the same state as this one, and patterns for the names of that state.
        trains_on: the cores of the trainer.

    Raises:
        ConfigError: on all ranks, if replicas or domains make no sense.
        JobInUse, UnsafePath, WorldMismatch: on all ranks, if any rank finds it.
    """
    world.connect()
    held: list[NodeDirectory] = []
    # One rank looks for all ranks of a node, so that they cannot end up in two directories if others rename some.
    top: str = world.tell_node(_claim(config.memory, config.job) if world.local_rank == 0 else "")

    def hold() -> None:
        if problem is not None:
            raise problem
        if redundancy.parse(config.redundancy).parity:
            erasure_codes.library()
        held.append(NodeDirectory(config.memory, config.job, top=top))
        held[0].lock(world.local_rank, world.local_size)

    alike: ReplicatedTensors | None = None
    try:
        world.on_all(hold)
        if world.any_of(replicas is not None):
            alike = ReplicatedTensors(world, *(replicas or ([world.rank], ["*"])))
        known = find_domains(world, config.domains if domains is None else domains)
    except BaseException as error:
        for memory in held:
            memory.close()
        if isinstance(error, MlflashError) and not isinstance(error, DeadlineExceeded):  # the same on all ranks
            world.free()
        raise
    try:
        return _assemble(config, world, held[0], alike, known, start, trains_on)
    except BaseException:
        held[0].close()
        raise


def _assemble(
    config: Config, world: World, memory: NodeDirectory, replicas: ReplicatedTensors | None, known: Domains | None,
    start: str, trains_on: frozenset[int],
) -> CourierState:  # fmt: skip
    """Take over what earlier runs left. Collective over the world."""
    disk = _use_disk(config, world, memory)
    earlier = scan_earlier_runs(config, world, memory)
    recorded = [group.ranks for group in earlier.choice.parity] if earlier.choice is not None else []
    standing = [] if known is None else [known.names(name) for name in world.topology.node_names]
    placement = place(world.topology, redundancy.parse(config.redundancy), standing, recorded)
    if replicas is not None and config.share:
        replicas.share(losses_of(placement.scheme, world))
    protection = Protection(world, placement, "p2p" if config.copies else config.transport, config.job)
    pool = SlotPool(memory, protection.owners, config.slots.copies, config.slots.own, disk, config.slots.kept)
    copy_threads = as_many_as_help(world.ranks_on_host, world.least_of, trains_on)
    pace = SendRate(config.send_rate)
    run_id: bytes = world.broadcast(os.urandom(16), 0)
    recorder = world.on_all(lambda: _recorder(config, world, memory, run_id.hex()[:8], start))
    examiner = Examiner(config.check_values, [pattern for pattern in config.check_skip.split(",") if pattern])
    certification = Certification(config.certify_after, config.on_suspect == "keep", config.history,
                                  config.keeps_on_disk)  # fmt: skip
    pool.older, pool.history = certification.older, certification.history
    certification.found(earlier.history)
    if earlier.certified is not None and config.certify_after and earlier.certified.world_size == world.size:
        certification.certified = Saved(earlier.certified.attempt, earlier.certified.step)
    state = CourierState(config, world, memory, protection, known, pool, recorder, copy_threads, pace, examiner,
                         certification, replicas, run_id)  # fmt: skip
    if protection.transport == "rma" and world.world is not None:
        world.poke = Poke(world)
    state.generation, state.floor, state.left.unusable = earlier.newest, earlier.floor, earlier.unusable
    if earlier.complete is not None:
        state.left.step = earlier.complete.step
    state.gives_way, pool.aside = not earlier.unusable, earlier.aside
    state.adopt(earlier.stock, earlier.choice)
    if earlier.choice is not None and earlier.choice.world_size == world.size:
        state.left.attempt = earlier.choice.attempt
    if config.certify_after and world.rank == 0:
        log.info("certify_after=%d: memory holds %d states of each rank, and as many of each copy, instead of 2, to "
                 "keep the certified step%s", config.certify_after, config.slots.copies,
                 " and the one on trial" if config.slots.copies > 3 else "")  # fmt: skip
    if not config.job.endswith(LIGHT):  # its whole saves have the same
        _say_what_is_made(world, placement)
        _say_what_is_slow(world, config.memory)
        _say_what_is_close(world, placement, state)
    return state


def _claim(memory: str, job: str) -> str:
    try:
        return claim_user_directory(memory, job)
    except (OSError, MlflashError):
        return ""


def _use_disk(config: Config, world: World, memory: NodeDirectory) -> Disk | None:
    """Find the disk of this node for copies; None: they are in memory. Collective over the world.

    Raises:
        ConfigError: on all ranks, if the directory is the same on several nodes.
    """
    if not config.copies:
        return None
    top: str = world.tell_node(_claim(config.copies, config.job) if world.local_rank == 0 else "")
    try:
        memory.use_disk(config.copies, top)
    except (OSError, MlflashError) as error:
        log.warning("the copies that rank %d holds are in memory: copies=%s cannot be used: %s",
                    world.rank, config.copies, text_of(error))  # fmt: skip
    disk = None if memory.disk is None else Disk(memory.disk)
    seen: list[str] = []
    steps: list[Callable[[NodeDirectory], object]] = [
        lambda directory: directory.forget_pulses(),
        lambda directory: directory.leave_pulse(world.node_index),
        lambda directory: seen.extend(directory.pulse_names()),
        lambda directory: directory.forget_pulses(),
    ]
    for work in steps:
        if disk is not None and world.local_rank == 0:
            with disk.watched():
                work(disk.directory)
        world.barrier()

    def check() -> None:
        if len(seen) > 1:
            raise ConfigError("copies= must be a directory on a disk of each node, which other nodes do not see",
                              found=f"{len(seen)} nodes of this job in {config.copies}")  # fmt: skip

    world.on_all(check)
    return disk


def _recorder(config: Config, world: World, memory: NodeDirectory, run: str, start: str) -> CourierRecorder:
    facts = RankFacts(
        world.rank, world.size, world.local_rank, world.node_name, os.environ.get("MLFLASH_RUN", ""), start
    )
    file = file_of_node(config.log, world.node_index) if config.log else None
    exporter = Exporter(config.job) if targets_of(config.metrics)[1] else None
    events = EventLog(file, exporter, run=run, rank=world.rank, node=world.node_name, by="courier")
    return CourierRecorder(world.rank, CourierHeartbeat(memory, facts, config.heartbeat), events)


def _say_what_is_made(world: World, placement: Placement) -> None:
    """Warn if there are too few nodes for the requested redundancy."""
    part = world.mpi is not None and world.mpi.COMM_WORLD.size > world.size
    asked, names = placement.scheme, world.topology.node_names
    copied, nodes, ranks = any(placement.partners), len(names), len(placement.partners)
    if asked.kind == "none" or world.rank:
        return
    if nodes == 1 and part:
        log.warning(
            "redundancy %r protects nothing here: all ranks that save together are on %s, and what they save is lost "
            "with it; let ranks of other nodes save with them, or drain it (directory=, drain_every=)",
            str(asked), names[0],
        )  # fmt: skip
    elif nodes == 1:
        log.warning(
            "mlflash protects %d rank%s on 1 node (%s): checkpoints survive the loss of any process, but not of this "
            "node; redundancy=%r needs a second node", ranks, "s" * (ranks > 1), names[0], str(asked),
        )  # fmt: skip
    elif nodes < asked.losses + (2 if asked.parity else 1) or (asked.parity and copied):
        log.warning("redundancy %r needs more nodes with equally many ranks than there are here (%d): %s is made of it",
                    str(asked), nodes, made(placement))  # fmt: skip


def _say_what_is_close(world: World, placement: Placement, state: CourierState) -> None:
    """Warn if a failure domain has more of a group than the group may lose."""
    close = too_close(world.topology, placement, state.domains_by_kind)
    if close and world.rank == 0:
        more = f" (and {len(close) - _NAMED} more)" if len(close) > _NAMED else ""
        log.warning("%s%s: if that is lost, memory cannot restore", "; ".join(close[:_NAMED]), more)


def _say_what_is_slow(world: World, memory: str) -> None:
    """Warn if slots would be on a disk or on a network file system. Collective over the world."""
    kinds = world.gather_nodes(slow_kind(memory) if world.local_rank == 0 else "")
    slow = [f"{kind} on {name}" for kind, name in zip(kinds, world.topology.node_names, strict=True) if kind]
    if slow and world.rank == 0:
        log.warning("%s is not in memory: it is %s; saves will be as slow as that file system; use memory='/dev/shm'",
                    memory, listed(slow, _NAMED))  # fmt: skip


def find_domains(world: World, given: Any) -> Domains | None:
    """Find the failure domains of the nodes: the given ones, else what Slurm tells each node, else Slurm's topology.

    Raises:
        ConfigError: on all ranks, if ``given`` makes no sense.
    """
    # Only one rank reads the file, so that all ranks have the same version of it.
    domains: Domains | None = world.on_all(lambda: from_argument(given) if world.rank == 0 else None)
    if given is None:
        own = discover(os.environ, world.node_name) if world.local_rank == 0 else None
        of_nodes = world.gather_nodes(own)
        domains = join_domains(list(zip(world.topology.node_names, of_nodes, strict=True)))
        if domains is None and world.rank == 0 and "SLURM_JOB_ID" in os.environ and len(of_nodes) > 2:
            domains = ask_slurm()
    domains = world.broadcast(domains, 0)
    unknown = [] if domains is None else [name for name in world.topology.node_names if not domains.knows(name)]
    if unknown and given is not None and world.rank == 0:
        log.warning("the failure domains of %s are not given: each of these nodes counts as a domain of its own",
                    listed(unknown, _NAMED))  # fmt: skip
    return domains
