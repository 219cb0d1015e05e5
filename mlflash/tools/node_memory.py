"""Read what is in the memory of nodes from the first page of each file, without making, locking or mapping anything.

A live job may write a file while it is read. If a file looks damaged and then changes, it was being written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash

from ..errors import CorruptSlot, MlflashError, UnsafePath
from ..memory import slot
from ..memory.inventory import Inventory, join, of_headers
from ..memory.node_directory import NodeDirectory
from ..memory.parity_layout import decode_heads
from ..memory.slot import HEADER_NBYTES, MAGIC, Header, Kind, Verdict, read_record, unpack
from ..mpi.world import World, gather
from ..state.layout import CHECK_NBYTES, PAGE_NBYTES
from ..state.manifest import Manifest, decode
from .output import age_s

_LOOKS, _NAP_S = 3, 0.05
RUN_NBYTES = 8 << 20  # read at a time


@dataclasses.dataclass(frozen=True)
class File:
    """A file of a node."""

    name: str
    nbytes: int
    header: Header | None = None
    committed: bool = False
    restores: int = 0
    verdict: Verdict = Verdict.UNKNOWN  # what is known of its values
    damage: str = ""  # why it cannot be used, although it should hold something; "" if nothing is wrong

    def to_json(self) -> dict[str, Any]:
        header = self.header
        contents = {} if header is None else {
            "holds": header.kind.name.lower(), "step": header.step, "rank": header.rank, "ranks": header.world_size,
            "generation": header.attempt.generation, "saved_on": header.node, "scheme": header.scheme,
            "group": list(header.group), "committed": self.committed, "restores": self.restores,
            "age_s": age_s(header.unix_ns),
        }  # fmt: skip
        return {"file": self.name, "nbytes": self.nbytes, "damage": self.damage or None, "holds": None} | contents


@dataclasses.dataclass(frozen=True)
class Node:
    """What a job holds in the memory of a node."""

    name: str
    path: str = ""
    pid: int | None = None
    drain_asked: bool = False  # whether a drain was requested and no process has noticed it yet
    files: tuple[File, ...] = ()
    error: str = ""  # why it cannot be looked at; "" if it can

    def to_json(self) -> dict[str, Any]:
        return {"node": self.name, "path": self.path, "pid": self.pid, "drain_asked": self.drain_asked,
                "nbytes": self.nbytes, "files": [file.to_json() for file in self.files]}  # fmt: skip

    @property
    def sealed(self) -> list[tuple[File, Header]]:
        return [(file, file.header) for file in self.files if file.header is not None]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def damaged(self) -> list[File]:
        return [file for file in self.files if file.damage]

    @property
    def newest(self) -> Header | None:
        headers = [header for _, header in self.sealed]
        return max(headers, key=lambda header: header.attempt.generation, default=None)


def look_around(world: World, memory: str, job: str) -> list[Node]:
    """Look at the memory of all nodes of the world. Collective.

    Returns:
        The nodes on rank 0, and an empty list on the others.

    Raises:
        UnsafePath: on all ranks, if a directory is not private.
    """
    own_node: Node | None = None
    error: MlflashError | None = None
    try:
        own_node = look(memory, job, world.node_name) if world.local_rank == 0 else None
    except MlflashError as problem:
        problem.node = world.node_name
        error = problem
    nodes = gather(world, own_node)
    world.raise_together(error)
    return [node for node in nodes if node is not None]


def look(memory: str, job: str, name: str) -> Node:
    """Look at the memory of a node. A node without memory of the job has no files."""
    try:
        held = NodeDirectory(memory, job, make=False)
    except FileNotFoundError:
        return Node(name)
    try:
        files = [file for path in held.slot_names() if (file := _look_at(held, path)) is not None]
        return Node(name, held.path, held.alive(), held.has_request(), tuple(files))
    finally:
        held.close()


def _look_at(held: NodeDirectory, name: str) -> File | None:
    """Look at a file until it is good or no longer changes. None if it is gone."""
    before = b""
    for again in range(_LOOKS):
        try:
            fd = held.open(name, os.O_RDONLY)
        except FileNotFoundError:
            return None
        except UnsafePath as error:
            return File(name, 0, damage=str(error))
        try:
            page, nbytes = os.pread(fd, slot.VERDICT_START + slot.RECORD_NBYTES, 0), os.fstat(fd).st_size
        finally:
            os.close(fd)
        file = _read_page(name, page, nbytes)
        if not file.damage or (again and page[:HEADER_NBYTES] == before):
            return file
        before = page[:HEADER_NBYTES]
        time.sleep(_NAP_S)
    return File(name, nbytes)  # it changes all the time


def _read_page(name: str, page: bytes, nbytes: int) -> File:
    if page[: len(MAGIC)] != MAGIC:
        blank = not any(page[:HEADER_NBYTES])
        # A header that is being written or erased begins with zeros.
        return File(name, nbytes, damage="" if blank or not any(page[: len(MAGIC)]) else "it has no valid header")
    try:
        header = unpack(page)
    except CorruptSlot as error:
        return File(name, nbytes, damage=error.message)
    if header.extents.nbytes > nbytes:
        return File(name, nbytes, damage=f"it has only {nbytes:,} of {header.extents.nbytes:,} bytes")
    committed = read_record(page, slot.COMMIT_START, header.attempt) is not None
    restores = read_record(page, slot.RESTORES_START, header.attempt) or 0
    return File(name, nbytes, header, committed, restores, slot.read_verdict(page, header.attempt))


def inventory_of(nodes: list[Node]) -> Inventory:
    """Return the sealed files of some nodes, numbered as in the list."""
    parts = [
        of_headers([(file.name, header, file.restores, file.verdict) for file, header in node.sealed], number)
        for number, node in enumerate(nodes)
    ]
    return join(parts or [of_headers([], 0)])


class Changed(Exception):
    """The file no longer holds what its header said, because the job writes it."""


class Sealed(contextlib.AbstractContextManager["Sealed"]):
    """A file of this node that is open for reading. Nothing of it is mapped, because the job may rewrite it meanwhile.

    The job unseals a slot before the first byte changes. So if the header is the same before and after, the bytes are
    those that were sealed.
    """

    def __init__(self, memory: NodeDirectory, name: str, header: Header):
        self.name, self.header = name, header
        self._memory, self._fd = memory, self._open(memory)

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def _open(self, memory: NodeDirectory) -> int:
        try:
            return memory.open(self.name, os.O_RDONLY)
        except (FileNotFoundError, UnsafePath):
            raise Changed from None

    def read(self, start: int, nbytes: int) -> np.ndarray:
        """Read bytes of the file: ``(nbytes,)`` uint8, or fewer if the file ends before."""
        raw = np.empty(nbytes, dtype=np.uint8)
        done = 0
        while done < nbytes and (got := os.preadv(self._fd, [raw[done:].data], start + done)):
            done += got
        return raw[:done]

    def manifest(self) -> Manifest:
        raw = self.read(PAGE_NBYTES, self.header.manifest_nbytes).tobytes()
        return decode(raw, self.header.extents.payload_nbytes)

    def check(self) -> None:
        """Check that the file still has the same header: then everything read before is good. Raises Changed if not."""
        fd = self._open(self._memory)  # not the open one, which may have been deleted
        try:
            if unpack(os.pread(fd, HEADER_NBYTES, 0)) != self.header:
                raise Changed
        except CorruptSlot:
            raise Changed from None
        finally:
            os.close(fd)

    def verify(self, advance: Callable[[int], None]) -> None:
        """Check every byte against the checksums.

        Raises:
            CorruptSlot: something is damaged.
            Changed: the job writes the file.
        """
        try:
            self._verify(advance)
        finally:
            self.check()

    def _verify(self, advance: Callable[[int], None]) -> None:
        extents = self.header.extents
        table = np.frombuffer(self.read(extents.table_start, extents.blocks * CHECK_NBYTES).tobytes(), dtype="<u8")
        if table.size != extents.blocks or slot.table_check(table) != self.header.table_check:
            raise CorruptSlot("its block table is damaged")
        bad: list[int] = []
        many = max(1, RUN_NBYTES // extents.block_nbytes)
        for first in range(0, extents.blocks, many):
            blocks = [extents.block(number) for number in range(first, min(extents.blocks, first + many))]
            start, nbytes = blocks[0].start, blocks[-1].stop - blocks[0].start
            raw = self.read(PAGE_NBYTES + start, nbytes)
            sums = [xxhash.xxh3_64_intdigest(raw[block.start - start : block.stop - start].data) for block in blocks]
            bad += [first + nth for nth, check in enumerate(sums) if check != int(table[first + nth])]
            advance(nbytes)
        if bad:
            raise CorruptSlot(f"{len(bad)} of {extents.blocks} blocks are damaged, first block {bad[0]}")
        if self.header.kind is Kind.SLOT:
            self.manifest()
        elif self.header.kind is Kind.PARITY:
            decode_heads(self.read(PAGE_NBYTES, self.header.manifest_nbytes).tobytes(), self.header, self.name)
