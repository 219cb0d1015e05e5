"""What is in the memory of the nodes, as the first page of each file says; nothing is made, locked or mapped.

A job that is alive may write a file while it is read: what is damaged at one moment and another thing at the next was
being written.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import time

from ..errors import CorruptSlot, MlflashError, UnsafePath
from ..memory.inventory import Inventory, join, of_headers
from ..memory.node_directory import NodeDirectory, emulated_nodes
from ..memory.slot_header import (
    COMMIT_START,
    HEADER_NBYTES,
    MAGIC,
    RECORD_NBYTES,
    RESTORES_START,
    VERDICT_START,
    Header,
    Verdict,
    read_record,
    read_verdict,
    unpack,
)
from ..mpi.gather_on_rank_0 import gather
from ..mpi.world import World

_LOOKS, _NAP_S = 3, 0.05


@dataclasses.dataclass(frozen=True)
class File:
    """A file of a node.

    Attributes:
        name, nbytes: of it.
        header: what it holds; None where it is not sealed.
        committed: whether it has the receipt of its commit.
        restores: how many runs have restored what it holds.
        verdict: what is known of the values in it.
        damage: why it cannot be used though it says that it holds something; "" where nothing is wrong.
    """

    name: str
    nbytes: int
    header: Header | None = None
    committed: bool = False
    restores: int = 0
    verdict: Verdict = Verdict.UNKNOWN
    damage: str = ""


@dataclasses.dataclass(frozen=True)
class Node:
    """A node, real or emulated.

    Attributes:
        name: of it.
        path: the job's directory there.
        emulated: its number among the emulated ones; None: a real one.
        pid: a live process of the job; None: there is none.
        drain_asked: whether somebody asked for a drain, and no process has heard it yet.
        files: of the job, sorted.
    """

    name: str
    path: str = ""
    emulated: int | None = None
    pid: int | None = None
    drain_asked: bool = False
    files: tuple[File, ...] = ()

    @property
    def sealed(self) -> list[tuple[File, Header]]:
        """The files that hold something."""
        return [(file, file.header) for file in self.files if file.header is not None]

    @property
    def damaged(self) -> list[File]:
        """The files that say that they hold something, and cannot be used."""
        return [file for file in self.files if file.damage]


def look_around(world: World, memory: str, job: str, as_restored: bool = False) -> list[Node]:
    """Look at the memory of all nodes of the world; of this one, and all emulated on it, where a process is alone.

    Collective over the world.

    Args:
        world: the processes.
        memory, job: where.
        as_restored: look where a Checkpointer of these processes would, and nowhere else.

    Returns:
        The nodes, on rank 0; nothing on the others.

    Raises:
        UnsafePath: on all ranks, where a directory is not private.
    """
    mine: list[Node] = []
    error: MlflashError | None = None
    if world.local_rank == 0:
        try:
            where = places(world, memory, job, as_restored)
            mine = [look(memory, job, number, name) for number, name in where]
        except MlflashError as problem:
            problem.node = world.node_name
            error = problem
    told = gather(world, mine)
    world.raise_together(error)
    return [node for nodes in told for node in nodes]


def places(world: World, memory: str, job: str, as_restored: bool = False) -> list[tuple[int | None, str]]:
    """The nodes that this process looks at: number among the emulated ones, and name. Not collective."""
    if world.emulated and (as_restored or world.world is not None):
        return [(world.emulated_node, world.node_name)]
    host = world.node_name if world.world is not None else socket.gethostname()
    if as_restored:
        return [(None, host)]
    several = world.world is not None and len(world.topology.node_names) > 1
    found: list[tuple[int | None, str]]
    found = [(number, f"{host}:node{number}" if several else f"node{number}") for number in emulated_nodes(memory, job)]
    return found if found and not look(memory, job, None, host).files else [(None, host), *found]


def look(memory: str, job: str, emulated: int | None, name: str) -> Node:
    """Look at a node's memory; a node without memory of the job has no files.

    Not collective.

    Raises:
        UnsafePath: its directory is not private to this user.
    """
    try:
        held = NodeDirectory(memory, job, emulated, make=False)
    except FileNotFoundError:
        return Node(name, "", emulated)
    try:
        files = [file for slot in held.slot_names() if (file := _look_at(held, slot)) is not None]
        return Node(name, held.path, emulated, held.alive(), held.has_request(), tuple(files))
    finally:
        held.close()


def _look_at(held: NodeDirectory, name: str) -> File | None:
    """Look at a file until it is not damaged or does not change; None where it is gone."""
    before = b""
    for again in range(_LOOKS):
        try:
            fd = held.open(name, os.O_RDONLY)
        except FileNotFoundError:
            return None
        except UnsafePath as error:
            return File(name, 0, damage=str(error))
        try:
            page, nbytes = os.pread(fd, VERDICT_START + RECORD_NBYTES, 0), os.fstat(fd).st_size
        finally:
            os.close(fd)
        file = _understand(name, page, nbytes)
        if not file.damage or (again and page[:HEADER_NBYTES] == before):
            return file
        before = page[:HEADER_NBYTES]
        time.sleep(_NAP_S)
    return File(name, nbytes)  # it changes all the time


def _understand(name: str, page: bytes, nbytes: int) -> File:
    if page[: len(MAGIC)] != MAGIC:
        blank = not any(page[:HEADER_NBYTES])
        # Of a header that is being written, or erased, the first bytes are zeros.
        return File(name, nbytes, damage="" if blank or not any(page[: len(MAGIC)]) else "this is no header")
    try:
        header = unpack(page)
    except CorruptSlot as error:
        return File(name, nbytes, damage=error.message)
    if header.extents.nbytes > nbytes:
        return File(name, nbytes, damage=f"it has {nbytes:,} bytes of {header.extents.nbytes:,}")
    committed = read_record(page, COMMIT_START, header.attempt) is not None
    restores, verdict = read_record(page, RESTORES_START, header.attempt) or 0, read_verdict(page, header.attempt)
    return File(name, nbytes, header, committed, restores, verdict)


def inventory_of(nodes: list[Node]) -> Inventory:
    """The sealed files of some nodes, which are numbered as in the list. Not collective."""
    parts = [
        of_headers([(file.name, header, file.restores, file.verdict) for file, header in node.sealed], number)
        for number, node in enumerate(nodes)
    ]
    return join(parts or [of_headers([], 0)])
