"""The MPI library, and whether MPI and the launcher agree about ranks and nodes."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConfigError
from ..human_readable.wording import many
from ..mpi.fabric import has_rdma
from ..mpi.world import World
from .findings import Finding, fine, warning, wrong
from .launch_environment import tidy_version

_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
_ROUNDS = 5
_SKEW_S = 1.0


def library(mpi: Any) -> Iterator[Finding]:
    """Name the MPI library, its path, and its thread level. Not collective."""
    path = loaded_from(Path("/proc/self/maps").read_text())
    yield fine("library", "{version}" + (" ({path})" if path else ""),
               version=tidy_version(mpi.Get_library_version()), path=path)  # fmt: skip
    constants = [getattr(mpi, f"THREAD_{name}") for name in _LEVELS]
    name = f"MPI_THREAD_{_LEVELS[constants.index(mpi.Query_thread())]}"
    if name.endswith("MULTIPLE"):
        yield fine("thread level", name)
    else:
        yield warning(
            "thread level", f"{name}: training waits while a save protects and commits",
            "let mlflash start MPI, or start it with MPI_THREAD_MULTIPLE (old Cray MPICH: "
            "MPICH_MAX_THREAD_SAFETY=multiple)",
        )  # fmt: skip


def loaded_from(maps: str) -> str:
    """Find the MPI library among the mapped files of ``/proc/self/maps``; "" if it has another name."""
    names = re.findall(r"(/\S*/libmpi(?:ch)?(?:_\w+)?\.so[.\d]*)\s*$", maps, re.MULTILINE)
    return names[0] if names else ""


class Place(NamedTuple):
    """The place of a rank, according to MPI, its kernel and Slurm.

    Attributes:
        node: number of the node in MPI.
        memory: boot ID of the kernel and number of the memory file system. It is the same for all ranks of a node; ""
            if there is no such file system.
        host: name of the host.
        slurm_node: SLURM_NODEID; "" if it is not set.
    """

    node: int
    memory: str
    host: str
    slurm_node: str


def nodes(world: World, memory: str, env: Mapping[str, str]) -> Iterator[Finding]:
    """Compare the nodes of MPI with those of the kernel and of Slurm. Collective over the world; for all ranks."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    try:
        seen = f"{boot} {os.stat(memory).st_dev}"
    except OSError:
        seen = ""
    mine = Place(world.node_index, seen, socket.gethostname(), env.get("SLURM_NODEID", ""))
    yield judge_nodes(world.gather(mine), memory, world.emulated)


def judge_nodes(places: Sequence[Place], memory: str, emulated: bool) -> Finding:
    """Compare the nodes of MPI with the memory file systems, and with the nodes of Slurm.

    Args:
        places: the places of all ranks.
        memory: the memory file system.
        emulated: whether the nodes are emulated.
    """
    check, count = "nodes", len({place.node for place in places})
    text = f"{many(count, 'node')} by MPI"
    if emulated:
        return fine(check, f"{text}, emulated (MLFLASH_RANKS_PER_NODE)")
    unseen = next((place for place in places if not place.memory), None)
    if unseen is not None:
        return wrong(check, f"{text}; {{host}} has no {memory}", "make it there, or name another one with --memory",
                     host=unseen.host)  # fmt: skip
    memory_of: dict[int, Place] = {}
    node_of: dict[str, Place] = {}
    for rank, place in enumerate(places):
        if memory_of.setdefault(place.node, place).memory != place.memory:
            return wrong(check, f"{text}, but ranks on {{host}} do not see the same {memory}: rank {rank} has its own",
                         "start all ranks of a node in one container, or give all containers the node's /dev/shm",
                         host=place.host)  # fmt: skip
        if (other := node_of.setdefault(place.memory, place)).node != place.node:
            return wrong(
                check, f"{text}, but two of them are one node: {{other}} and {{host}} have the same {memory}",
                "a slot and its copy would be lost together: start MPI so that it sees one node (without "
                "MPIR_CVAR_NOLOCAL, and with all ranks of a node in one container)", host=place.host, other=other.host,
            )  # fmt: skip
    slurm = {place.slurm_node for place in places}
    pairs = {(place.node, place.slurm_node) for place in places}
    if "" not in slurm and not count == len(slurm) == len(pairs):
        return warning(
            check, f"{text}, but {len(slurm)} by SLURM_NODEID",
            "harmless if mpiexec gave all ranks the environment of the first node; else start with srun",
        )  # fmt: skip
    return fine(check, text + (", as by Slurm" if "" not in slurm else ", each with its own memory" * (count > 1)))


def fabric() -> Finding:
    """Say which network MPI could use between nodes. Not collective; for one rank."""
    if has_rdma():
        return fine("fabric", "RDMA device found")
    return fine("fabric", "no RDMA device (/sys/class/infiniband, /sys/class/cxi): transport p2p")


def clocks(world: World) -> Iterator[Finding]:
    """Compare the clocks of the nodes. Collective over the world; for all ranks."""
    least = float("inf")
    for _ in range(_ROUNDS):
        world.agree([0])  # all leave it at about the same time
        told = world.gather(time.time())
        least = min(least, max(told) - min(told))
    if len(world.topology.node_names) > 1:
        yield judge_clocks(least)


def judge_clocks(apart_s: float) -> Finding:
    """Judge the difference between the clocks of nodes."""
    if apart_s < _SKEW_S:
        return fine("clocks", "at most {apart_s} apart", apart_s=apart_s)
    return warning("clocks", "{apart_s} apart", "ages of checkpoints will be wrong: set the clocks (chrony, NTP)",
                   apart_s=apart_s)  # fmt: skip


def domains(world: World, given: str | None) -> Iterator[Finding]:
    """Find the failure domains of the nodes, as a Checkpointer does. Collective over the world; for all ranks."""
    from ..startup.start import find_domains

    try:
        found = find_domains(world, given)
    except ConfigError as error:  # on all ranks
        yield wrong("failure domains", "{error}", "correct the file of MLFLASH_DOMAINS", error=error.message)
        return
    names = world.topology.node_names
    if found is None:
        yield unknown_domains(len(names))
        return
    paths = [found.names(name) for name in names]
    levels = [f"{len({path[level] for path in paths})} x {kind}" for level, kind in enumerate(found.kinds)]
    source = "MLFLASH_DOMAINS" if given is not None else "Slurm"
    strangers = [name for name in names if not found.knows(name)]
    text = f"{many(len(names), 'node')} in {', '.join(levels)}, by {source}"
    if strangers:
        yield warning("failure domains", text + f"; {len(strangers)} are not listed, for example {{first}}",
                      "each of them counts as its own domain: add them to the file", first=strangers[0])  # fmt: skip
    else:
        yield fine("failure domains", text)


def unknown_domains(nodes: int) -> Finding:
    """Say that the failure domains of the nodes are unknown."""
    if nodes < 3:
        return fine("failure domains", "unknown, and not useful for so few nodes")
    return warning("failure domains", "unknown: Slurm knows no switches or blocks",
                   "groups may share a rack: list the nodes of each rack in MLFLASH_DOMAINS=FILE (n[01-16] "
                   "rack1)")  # fmt: skip
