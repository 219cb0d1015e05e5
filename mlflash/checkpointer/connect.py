"""Starts the courier of a trainer, and makes what saving and restoring work with."""

from __future__ import annotations

import logging
import os
from typing import Any

from ..config import Config
from ..courier import connection
from ..courier.client import Client, TrainerContext
from ..courier.loaded_versions import loaded_versions, not_run_with
from ..courier.ranks import Ranks, check_torch_rank, replicas_of, some_ranks
from ..courier.records import Start, Started
from ..drain.drain import Drains
from ..errors import MlflashError
from ..memory.copy_threads import CopyThreads
from ..memory.node_directory import NodeDirectory
from ..memory.own_slots import OwnSlots
from ..state.manifest import provenance_of
from ..telemetry.heartbeat import RankFacts, TrainerHeartbeat, read_heartbeats
from ..telemetry.prometheus_metrics import Metrics
from ..telemetry.recorder import EventLog, TrainerRecorder, file_of_node

log = logging.getLogger("mlflash")


def connect(config: Config, comm: Any, process_group: Any, replicated: Any = None, domains: Any = None
            ) -> tuple[TrainerContext, Drains, Started]:  # fmt: skip
    """Start a rank's courier and connect the ranks.

    Collective over comm, or over the process group if there is no comm. Without comm, the first call is collective over
    all ranks of the job, because all couriers start together.

    Args:
        comm: an mpi4py communicator, which gives the ranks and carries an address; None: the ranks of the launcher.
        process_group: of torch.distributed. Its ranks must be those of comm; without comm, any ranks of the job.
        replicated, domains: see `Checkpointer`.

    Raises:
        MpiUnavailable: there is no MPI for couriers.
        ConfigError: on all ranks, if ``replicated`` or ``domains`` make no sense.
        JobInUse, UnsafePath, WorldMismatch: on all ranks, if any rank finds it.
    """
    shared = connection.get(config, comm)
    rank, size = shared.couriers.rank, shared.couriers.size
    ranks = shared.ranks_of(comm)
    assert ranks is not None
    if comm is None:
        ranks = some_ranks(process_group, rank, size) or ranks
    courier = Client(shared, config, ranks)
    whole = shared.group()  # `replicated` may be a communicator of the program's MPI
    group = None if whole is None else whole.Incl(ranks)
    start = _start(ranks.index(rank), len(ranks), group, process_group, replicated, domains)
    try:
        started = courier.introduce(start)
        memory = NodeDirectory(config.memory, config.job, make=False, top=started.top)
    except BaseException:
        courier.stop(abandon=True)
        raise
    trainer = _trainer(config, courier, process_group, memory, start, started)
    drains = Drains(courier, trainer.ranks, config)
    courier.attach(trainer, drains.moved, drains.lost)
    if started.goes_on:  # a rank that had started before this one has lost its courier, and does the same
        courier.call("protect_left")
    _say(trainer)
    return trainer, drains, started


def _say(trainer: TrainerContext) -> None:
    if not trainer.ranks.rank:
        log.info("courier: %s", trainer.courier.is_a)
        if (torch := loaded_versions().get("torch")) is not None and (warning := not_run_with(torch)) is not None:
            log.warning("%s", warning)


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


def _trainer(config: Config, courier: Client, process_group: Any, memory: NodeDirectory, start: Start, started: Started
             ) -> TrainerContext:  # fmt: skip
    """Make what saving and restoring work with."""
    ranks = Ranks(courier, started.rank, started.topology, config.timeout_s, process_group)
    slots = OwnSlots(memory, started.slots, courier)
    slots.update(started.files)
    recorder = _recorder(config, ranks, memory, start.name, started)
    threads = CopyThreads(started.copy_threads)
    provenance = provenance_of(loaded_versions(), config.provenance)
    return TrainerContext(config, courier, ranks, memory, slots, threads, recorder, provenance, started.sharing)


def _recorder(config: Config, ranks: Ranks, memory: NodeDirectory, start: str, started: Started) -> TrainerRecorder:
    local_rank = ranks.topology.ranks_on[ranks.node_index].index(ranks.rank)
    run = os.environ.get("MLFLASH_RUN", "")
    facts = RankFacts(ranks.rank, ranks.size, local_rank, ranks.node_name, run, start)
    metrics = None
    if config.metrics and not local_rank:  # the first rank of each node exports those of all
        metrics = Metrics(config.metrics, config.job, lambda: read_heartbeats(config.memory, config.job))
    file = file_of_node(config.log, ranks.node_index) if config.log else None
    events = EventLog(file, run=started.run, rank=ranks.rank, node=ranks.node_name)
    return TrainerRecorder(ranks.rank, TrainerHeartbeat(memory, facts, config.heartbeat), events, metrics)
