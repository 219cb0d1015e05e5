"""A trainer gets its courier, and what saving and restoring work with."""

from __future__ import annotations

import os
from typing import Any

from ..config import Config
from ..draining.drains import Drains
from ..errors import MlflashError
from ..memory.copy_threads import CopyThreads
from ..memory.node_directory import NodeDirectory
from ..memory.own_slots import OwnSlots
from ..mpi.courier import Courier
from ..mpi.world import World, find_world
from ..protocol.messages import Start, Started
from ..protocol.ranks import Ranks
from ..protocol.torch_rank import check_torch_rank, replicas_of
from ..protocol.trainer_context import TrainerContext
from ..telemetry.event_log import EventLog
from ..telemetry.heartbeat import RankFacts, TrainerHeartbeat, read_heartbeats
from ..telemetry.prometheus_metrics import Metrics
from ..telemetry.recorder import TrainerRecorder
from .in_thread import CourierThread
from .session import Session


def connect(config: Config, comm: Any, process_group: Any, replicated: Any = None, domains: Any = None
            ) -> tuple[TrainerContext, Drains, Started]:  # fmt: skip
    """Start a rank's courier, and let it connect the ranks. Collective over comm.

    Args:
        config: of the job.
        comm: an mpi4py communicator; None: that of this process's launcher.
        process_group: of torch.distributed, whose ranks must be those of comm.
        replicated, domains: see `Checkpointer`.

    Raises:
        MpiUnavailable: there is no MPI, or not the one of this launcher.
        ConfigError: on all ranks, where ``replicated`` or ``domains`` make no sense.
        JobInUse, UnsafePath, WorldMismatch: on all ranks, where any rank finds it so.
    """
    comm = find_world(os.environ) if comm is None else comm
    world = World(comm, config.ranks_per_node, config.timeout_s)
    problem, replicas = None, None
    try:
        check_torch_rank(world.rank, world.size, process_group)
        replicas = replicas_of(replicated, world.rank, world.size, comm, process_group)
    except MlflashError as error:
        problem = error
    jobs = Courier(world, threaded=world.threads, nice=config.nice)
    session = Session(config, world, jobs, lambda drain: drains.began(drain))
    courier = CourierThread(jobs, session)
    try:
        start = os.urandom(8).hex()
        started: Started = courier.call(Start(problem, replicas, domains, start))
        memory = NodeDirectory(config.memory, config.job, started.emulated_node, make=False, top=started.top)
    except BaseException:
        courier.stop(abandon=True)
        raise
    ranks = Ranks(courier, started.rank, started.topology, process_group)
    drains = Drains(courier, ranks, config.directory is not None)
    slots = OwnSlots(memory, started.slots, session.context.pool.mapped)
    recorder = _recorder(config, ranks, memory, start, started, session.context.recorder.events)
    session.context.recorder.flush = recorder.flush
    trainer = TrainerContext(config, courier, ranks, memory, slots, CopyThreads(started.copy_threads), recorder,
                             started.sharing)  # fmt: skip
    slots.update(started.files)
    session.attach(trainer)
    return trainer, drains, started


def _recorder(config: Config, ranks: Ranks, memory: NodeDirectory, start: str, started: Started, events: EventLog
              ) -> TrainerRecorder:  # fmt: skip
    local_rank = ranks.topology.ranks_on[ranks.node_index].index(ranks.rank)
    run = os.environ.get("MLFLASH_RUN", "")
    facts = RankFacts(ranks.rank, ranks.size, local_rank, ranks.node_name, run, start)
    metrics = None
    if config.metrics and not local_rank:  # the first rank of each node shows those of all
        node = started.emulated_node
        metrics = Metrics(config.metrics, config.job, lambda: read_heartbeats(config.memory, config.job, node))
    return TrainerRecorder(ranks.rank, TrainerHeartbeat(memory, facts), events, metrics)
