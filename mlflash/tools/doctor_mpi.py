"""Checks of MPI: its library and launcher, the nodes, and whether bytes arrive on other nodes as they were sent."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpointer.checkpointer import Checkpointer
from ..config import is_enabled
from ..errors import WorldMismatch, pip_install
from ..launch.launcher_variables import Launched
from ..launch.rendezvous import meeting_of
from ..mpi.fabric import between_nodes, choose_transport, has_rdma
from ..mpi.world import World
from ..placement.topology import Node
from ..text import many
from . import doctor_couriers
from .doctor_context import Context
from .doctor_findings import Finding, fine, warning, wrong

_SKEW_S = 1.0
_SAVED_NBYTES, _SAVES = 16 << 20, 4
_SLOW_RDMA_GBS, _SLOW_GBS = 0.5, 0.05


def library(context: Context) -> Iterator[Finding]:
    """Name the MPI library of this program, and its path. Not collective."""
    mpi, path = context.mpi, loaded_from(Path("/proc/self/maps").read_text())
    yield fine("library", "{version}" + (" ({path})" if path else ""), version=version_of(mpi), path=path)


def loaded_from(maps: str) -> str:
    """Find the MPI library among the mapped files of ``/proc/self/maps``; "" if it has another name."""
    names = re.findall(r"(/\S*/libmpi(?:ch)?(?:_\w+)?\.so[.\d]*)\s*$", maps, re.MULTILINE)
    return names[0] if names else ""


def version_of(mpi: Any) -> str:
    """Return name and version of an MPI library: "MPICH 5.0.2"."""
    name, version = mpi.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def name_of(launched: Launched) -> str:
    """Return the program that started a process: mpiexec, srun or torchrun; "" if it was started alone."""
    return {"hydra": "mpiexec", "prterun": "mpiexec", "none": ""}.get(launched.launcher, launched.launcher)


def pmi_of(library: str) -> str:
    """Return the value of ``srun --mpi=`` that an MPI needs, for its wheels or common builds."""
    return "pmix" if library.startswith("Open MPI") else "cray_shasta" if library.startswith("Cray") else "pmi2"


def world_size(context: Context) -> Iterator[Finding]:
    """Compare the size of MPI's world with the number of processes that were started. Then try couriers."""
    try:
        place = Path(context.settings.memory, f"mlflash-{os.getuid()}")
        meeting = meeting_of(context.environment, context.launched, place, 0.0).how
    except WorldMismatch:
        meeting = ""
    yield judge_size(context.launched, context.mpi.COMM_WORLD.size, version_of(context.mpi), meeting)
    if context.rank == 0 and os.path.isdir(context.settings.memory):  # `nodes` reports a missing one
        yield doctor_couriers.try_couriers(context.environment, context.settings.memory)


def judge_size(launched: Launched, size: int, library: str, meeting: str = "") -> Finding:
    """Judge the size of MPI's world. ``meeting`` says how the ranks find each other without MPI; "": not at all."""
    launcher, started = name_of(launched), launched.size
    if not launcher:
        return fine("world", f"{many(size, 'rank')}, because this process was started alone")
    source = {"srun": "SLURM_STEP_NUM_TASKS", "torchrun": "WORLD_SIZE"}.get(launcher, "mpiexec")
    if size == started:
        return fine("world", f"{many(size, 'rank')}, as {source} says")
    if size > 1:
        return warning("world", f"{many(size, 'rank')}, but {source} says {started}",
                       "start one process per rank, with one launcher only")  # fmt: skip
    if meeting:
        return fine("world", f"{many(started, 'rank')}, which meet by {meeting}; this command looks at this node only")
    paths = ", with I_MPI_PMI_LIBRARY=/path/to/libpmi2.so" if library.startswith("Intel") else ""
    advice = {
        "srun": f"start with srun --mpi={pmi_of(library)}{paths}, which {library} needs; srun --mpi=list shows what "
                "this Slurm has",
        "torchrun": f"{library} needs its launcher: start with mpiexec or srun, or {pip_install('mpich')}, which needs "
                    "none",
    }.get(launcher, f"use the mpiexec of {library}, which mpi4py loads here; or let mpi4py load the library of that "
                    "mpiexec (MPI4PY_LIBMPI=/path/to/libmpi.so)")  # fmt: skip
    return wrong("world", f"{launcher} started {started} processes, but each is alone in its MPI world: only the first "
                 "reports here", advice)  # fmt: skip


# Nodes


def nodes(context: Context) -> Iterator[Finding]:
    """Compare the memory and the hosts of the nodes. Collective over the world."""
    settings = context.settings
    yield judge_nodes(context.ranks.gather(settings.here), settings.memory, bool(settings.node))


def judge_nodes(of_ranks: Sequence[Node], memory: str, are_named: bool) -> Finding:
    """Judge whether each node has a host and a memory of its own.

    Args:
        are_named: whether the user has named the nodes, and so knows of several on one host.
    """
    count = len({(node.host, node.memory) for node in of_ranks})
    text = many(count, "node")
    for node in of_ranks:
        if not node.memory:
            return wrong("nodes", f"{text}; {node.name} has no {memory}", "make it there, or name another one with "
                         "--memory")  # fmt: skip
    memory_of: dict[str, Node] = {}
    node_of: dict[tuple[str, str], Node] = {}
    for rank, node in enumerate(of_ranks):
        other = node_of.setdefault((node.host.split()[-1], node.memory), node)
        if other.host != node.host:
            return wrong("nodes", f"{text}, but two of them are one node: {other.name} and {node.name} have the same "
                         f"{memory}", "give all containers of a host one host name")  # fmt: skip
        if memory_of.setdefault(node.host, node).memory != node.memory and not are_named:
            return wrong("nodes", f"{text}, but ranks on {node.name} do not see the same {memory}: rank {rank} has "
                         "its own, and a slot and its copy would be lost together", "start all ranks of a node in one "
                         "container, or give all containers the node's /dev/shm")  # fmt: skip
    return fine("nodes", text + ", each with its own memory" * (count > 1))


def clocks(context: Context) -> Iterator[Finding]:
    """Compare the clocks of the nodes. Collective over the world."""
    context.ranks.barrier()  # all leave it at about the same time
    times = context.ranks.gather(time.time())
    apart_s = max(times) - min(times)
    if apart_s >= _SKEW_S:
        yield warning("clocks", "{apart_s} apart", "ages of checkpoints will be wrong: set the clocks (chrony, NTP)",
                      apart_s=apart_s)  # fmt: skip
    elif len(context.ranks.topology.node_names) > 1:
        yield fine("clocks", "at most {apart_s} apart", apart_s=apart_s)


def failure_domains(context: Context) -> Iterator[Finding]:
    """Find the failure domains of the nodes, as a Checkpointer does. Collective over the world."""
    from ..courier.start import find_domains

    setting, names = context.settings.domains, context.ranks.topology.node_names
    found = find_domains(context.ranks, setting)
    if found is None and len(names) > 2:
        yield warning("failure domains", "unknown: Slurm knows no switches or blocks", "groups may share a rack: list "
                      "the nodes of each rack in MLFLASH_DOMAINS=FILE (n[01-16] rack1)")  # fmt: skip
    elif found is None:
        yield fine("failure domains", "unknown, and not useful for so few nodes")
    elif unlisted := [name for name in names if not found.knows(name)]:
        yield warning("failure domains", f"{len(unlisted)} nodes are not listed, for example {unlisted[0]}",
                      "each of them counts as its own domain: add them to the file of MLFLASH_DOMAINS")  # fmt: skip
    else:
        kinds = [f"{len({found.names(name)[level] for name in names})} x {kind}"
                 for level, kind in enumerate(found.kinds)]  # fmt: skip
        yield fine("failure domains", f"{many(len(names), 'node')} in {', '.join(kinds)}, by "
                   + ("Slurm" if setting is None else "MLFLASH_DOMAINS"))  # fmt: skip


def network(context: Context) -> Iterator[Finding]:
    """Save some bytes to the memory of the next node, which compares their checksums. Collective over the world."""
    world = context.ranks
    if len(world.topology.node_names) == 1 or not is_enabled(context.environment):
        return
    some_have_rdma = world.any_of(has_rdma())
    if some_have_rdma and not has_rdma():
        yield warning("fabric", "this node has no RDMA device, but others have one", "ask your site about its network "
                      "card (/sys/class/infiniband, /sys/class/cxi)")  # fmt: skip
    between, transport = between_nodes(world), choose_transport(world, context.settings.transport)
    memory = os.path.join(context.settings.memory, "mlflash-doctor-" + world.broadcast(secrets.token_hex(4), 0))
    seconds = _save(world, memory, transport) if world.local_rank == 0 else 0.0
    yield judge_network(transport, between, _SAVED_NBYTES / world.tell_node(seconds) / 1e9)


def _save(world: World, memory: str, transport: str) -> float:
    """Save a few times, and return the seconds of the fastest save. Collective over the leaders."""
    os.makedirs(memory, 0o700, exist_ok=True)
    try:
        with Checkpointer(
            job="doctor", memory=memory, comm=world.leaders, transport=transport, redundancy="copy",
            strict=True, timeout_s=world.timeout_s, when_busy="wait", log="",
            metrics="", drain_every=0, send_rate=0.0, fresh=False,
        ) as checkpointer:  # fmt: skip
            state = {"bytes": np.ones(_SAVED_NBYTES, np.uint8)}
            saves = [checkpointer.save(step, state).wait() for step in range(_SAVES)]
        world.meet(world.leaders)  # afterwards no rank has it open
    finally:
        shutil.rmtree(memory, ignore_errors=True)
    return min(save.commit_s or 0.0 for save in saves)


def judge_network(transport: str, between: str, saved_gbs: float) -> Finding:
    """Judge how fast a save came to the next node."""
    text = f"saves come to the next node at {{saved_gbs}} by {transport} ({between})"
    if saved_gbs < (_SLOW_RDMA_GBS if between == "RDMA" else _SLOW_GBS):
        return warning("network", text + ": slow", "check which network MPI uses: MPIR_CVAR_CH4_NETMOD, "
                       "UCX_TLS, UCX_NET_DEVICES, FI_PROVIDER, FI_TCP_IFACE; RDMA needs memlock, too",
                       saved_gbs=saved_gbs)  # fmt: skip
    return fine("network", text, saved_gbs=saved_gbs)
