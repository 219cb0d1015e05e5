"""Starts the courier of a trainer, and makes what saving and restoring work with."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..config import Config
from ..draining.drain import Drains
from ..errors import MlflashError
from ..memory.copy_threads import CopyThreads
from ..memory.node_directory import NodeDirectory
from ..memory.own_slots import OwnSlots
from ..memory.shared_memory_segment import Segment
from ..mpi.job_thread import JobThread
from ..mpi.world import World, find_world
from ..protocol.client import Client
from ..protocol.loaded_versions import loaded_versions, not_run_with
from ..protocol.messages import Start, Started
from ..protocol.ranks import Ranks
from ..protocol.torch_rank import check_torch_rank, replicas_of, some_ranks
from ..protocol.trainer_context import TrainerContext
from ..state.manifest import provenance_of
from ..telemetry.heartbeat import RankFacts, TrainerHeartbeat, read_heartbeats
from ..telemetry.prometheus_metrics import Metrics
from ..telemetry.recorder import EventLog, TrainerRecorder, file_of_node
from .choice import Choice, choose
from .in_thread import CourierThread
from .session import Session

log = logging.getLogger("mlflash")


def connect(config: Config, comm: Any, process_group: Any, replicated: Any = None, domains: Any = None
            ) -> tuple[TrainerContext, Drains, Started]:  # fmt: skip
    """Start a rank's courier and connect the ranks.

    Collective over comm, or over the process group if there is no comm. If couriers are processes, the first call is
    collective over all ranks of the job, because all couriers start together.

    Args:
        comm: an mpi4py communicator; None: that of this process's launcher.
        process_group: of torch.distributed. Its ranks must be those of comm; without comm, any ranks of the job.
        replicated, domains: see `Checkpointer`.

    Raises:
        MpiUnavailable: there is no MPI, or not the one of this launcher.
        ConfigError: on all ranks, if ``replicated`` or ``domains`` make no sense.
        JobInUse, UnsafePath, WorldMismatch: on all ranks, if any rank finds it.
    """
    choice = choose(config.courier, comm)
    if choice.is_process:
        return _connect_process(choice, config, comm, process_group, replicated, domains)
    among: tuple[int, ...] | None = None
    if comm is None:
        comm = find_world(os.environ)
        rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
        among = some_ranks(process_group, rank, size)
    world = World(comm, config.here, config.timeout_s, among, config.job)
    drains: list[Drains] = []
    jobs = JobThread(world, threaded=world.threads)
    session = Session(config, world, jobs, lambda drain: drains[0].began(drain))
    courier = CourierThread(jobs, session, choice.why)
    start = _start(world.rank, world.size, _group_of(comm, among), process_group, replicated, domains)
    started = _started(courier, start)
    context = session.context
    trainer = _trainer(config, courier, process_group, start, started, context.pool.mapped, context.recorder.events)
    context.recorder.flush = trainer.recorder.flush
    drains.append(Drains(courier, trainer.ranks, config.directory is not None))
    session.attach(trainer)
    _say(trainer)
    return trainer, drains[0], started


def _connect_process(choice: Choice, config: Config, comm: Any, process_group: Any, replicated: Any, domains: Any
                     ) -> tuple[TrainerContext, Drains, Started]:  # fmt: skip
    # These imports run while the zygote does its own.
    from .in_process import CourierProcess
    from .linked import link

    connection = link(config, choice.zygote, comm)
    rank, size = connection.couriers.rank, connection.couriers.size
    ranks = connection.ranks_of(comm)
    assert ranks is not None
    if comm is None:
        ranks = some_ranks(process_group, rank, size) or ranks
    courier = CourierProcess(connection, config, ranks)
    whole = connection.group()  # `replicated` may be a communicator of the program's MPI
    group = None if whole is None else whole.Incl(ranks)
    start = _start(ranks.index(rank), len(ranks), group, process_group, replicated, domains)
    started = _started(courier, start)
    trainer = _trainer(config, courier, process_group, start, started, dict)
    courier.start = start
    courier.trainer = trainer
    courier.drain.drains = drains = Drains(courier, trainer.ranks, config.directory is not None)
    _say(trainer)
    return trainer, drains, started


def _say(trainer: TrainerContext) -> None:
    if not trainer.ranks.rank:
        log.info("courier: %s", trainer.courier.is_a)
        if (torch := loaded_versions().get("torch")) is not None and (said := not_run_with(torch)) is not None:
            log.warning("%s", said)


def _group_of(comm: Any, ranks: Sequence[int] | None) -> Any:
    """MPI's group of some ranks of a communicator; None means all."""
    return None if comm is None else comm.Get_group() if ranks is None else comm.Get_group().Incl(ranks)


def _start(rank: int, size: int, group: Any, process_group: Any, replicated: Any, domains: Any) -> Start:
    """How this rank starts, or why it cannot."""
    problem, replicas = None, None
    try:
        check_torch_rank(rank, size, process_group)
        replicas = replicas_of(replicated, rank, size, group, process_group)
    except MlflashError as error:
        problem = error
    if isinstance(domains, os.PathLike):
        domains = os.fspath(domains)  # messages are plain data
    return Start(problem, replicas, domains, os.urandom(8).hex())


def _started(courier: Client, start: Start) -> Started:
    try:
        started: Started = courier.call(start)
    except BaseException:
        courier.stop(abandon=True)
        raise
    return started


def _trainer(config: Config, courier: Client, process_group: Any, start: Start, started: Started,
             known: Callable[[], Mapping[int, Segment]], events: EventLog | None = None) -> TrainerContext:  # fmt: skip
    """Make what saving and restoring work with; ``known``: the mappings of slots that this process already has."""
    try:
        memory = NodeDirectory(config.memory, config.job, make=False, top=started.top)
    except BaseException:
        courier.stop(abandon=True)
        raise
    ranks = Ranks(courier, started.rank, started.topology, config.timeout_s, process_group)
    slots = OwnSlots(memory, started.slots, known)
    slots.update(started.files)
    recorder = _recorder(config, ranks, memory, start.start, started, events)
    threads = CopyThreads(started.copy_threads)
    provenance = provenance_of(loaded_versions(), config.provenance)
    return TrainerContext(config, courier, ranks, memory, slots, threads, recorder, provenance, started.sharing)


def _recorder(config: Config, ranks: Ranks, memory: NodeDirectory, start: str, started: Started,
              events: EventLog | None) -> TrainerRecorder:  # fmt: skip
    local_rank = ranks.topology.ranks_on[ranks.node_index].index(ranks.rank)
    run = os.environ.get("MLFLASH_RUN", "")
    facts = RankFacts(ranks.rank, ranks.size, local_rank, ranks.node_name, run, start)
    metrics = None
    if config.metrics and not local_rank:  # the first rank of each node exports those of all
        metrics = Metrics(config.metrics, config.job, lambda: read_heartbeats(config.memory, config.job))
    is_thread = events is not None
    if events is None:
        file = file_of_node(config.log, ranks.node_index) if config.log else None
        events = EventLog(file, run=started.run, rank=ranks.rank, node=ranks.node_name)
    return TrainerRecorder(ranks.rank, TrainerHeartbeat(memory, facts, config.heartbeat), events, metrics, is_thread)
