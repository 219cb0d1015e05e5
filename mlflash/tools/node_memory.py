"""What is in the memory of nodes, what that can restore, and which losses it survives.

The first page of each file is read, without making, locking or mapping anything. A live job may write a file while it
is read. If a file looks damaged and then changes, it was being written. Which losses are survived is found by taking
files away and trying, for any scheme.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import xxhash

from ..commit.earlier_runs import Choice, choose
from ..errors import ConfigError, CorruptSlot, MlflashError, UnsafePath
from ..memory import slot
from ..memory.inventory import NEWEST, Inventory, WantedStep, join, of_headers
from ..memory.node_directory import NodeDirectory
from ..memory.parity_layout import decode_heads
from ..memory.slot import HEADER_NBYTES, MAGIC, Attempt, Header, Kind, Verdict, read_record, unpack
from ..mpi.world import World, gather
from ..placement.redundancy import Scheme, parse
from ..state.layout import CHECK_NBYTES, PAGE_NBYTES
from ..state.manifest import Manifest, decode
from ..text import listed
from .output import age_s

_LOOKS, _NAP_S = 3, 0.05
RUN_NBYTES = 8 << 20  # read at a time
_PAIRS_OF = 64  # with more nodes, pairs are not tried
_NAMED = 3


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


# What the nodes can restore


@dataclasses.dataclass(frozen=True)
class Prospect:
    """An attempt to save a step that has files in memory."""

    attempt: Attempt
    step: int
    world_size: int
    scheme: str
    unix_ns: int
    committed: bool
    restores: int
    nbytes: int
    verdict: Verdict
    choice: Choice | None  # how to restore it. None: it cannot be restored
    missing: tuple[int, ...]  # the ranks that have no slot, whether or not parity can rebuild it

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step, "generation": self.attempt.generation, "run": self.attempt.run_id.hex(),
            "ranks": self.world_size, "scheme": self.scheme, "age_s": age_s(self.unix_ns), "committed": self.committed,
            "restorable": self.choice is not None, "restores": self.restores, "values": self.verdict.name.lower(),
            "nbytes": self.nbytes, "missing_ranks": list(self.missing),
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Restorability:
    """What the nodes can restore."""

    prospects: tuple[Prospect, ...]
    unseen: tuple[str, ...]  # nodes that headers name, but that were not looked at

    @property
    def newest(self) -> Prospect | None:
        """The attempt that a restore takes: the newest one that is not marked bad. None if there is none."""
        whole = (prospect for prospect in self.prospects if prospect.choice is not None)
        return next((prospect for prospect in whole if NEWEST.fits(prospect.step, prospect.verdict)), None)

    @property
    def lost(self) -> Prospect | None:
        """The newest attempt, if it was committed but these nodes cannot restore it. None otherwise."""
        known = (prospect for prospect in self.prospects if prospect.committed or prospect.choice is not None)
        first = next(known, None)
        return first if first is not None and first.choice is None else None


def what_is_restorable(nodes: Sequence[Node], together: bool) -> Restorability:
    """Say what some nodes can restore. ``together``: according to the launcher, these are all nodes that are left."""
    inventory, prospects = inventory_of(list(nodes)), []
    sealed: dict[Attempt, list[tuple[File, Header]]] = {}
    for file, header in (pair for node in nodes for pair in node.sealed):
        sealed.setdefault(header.attempt, []).append((file, header))
    for attempt, step, world_size in inventory.attempts():
        files, headers = zip(*sealed[attempt], strict=True)
        slots = {header.rank for header in headers if header.kind is Kind.SLOT}
        of_attempt = inventory.of(attempt)
        prospects.append(Prospect(
            attempt, step, world_size, recorded_scheme(header.scheme for header in headers),
            max(header.unix_ns for header in headers), any(file.committed for file in files),
            max(file.restores for file in files), sum(file.nbytes for file in files), of_attempt.verdict,
            choose(of_attempt, (), WantedStep(step)), tuple(sorted(set(range(world_size)) - slots)),
        ))  # fmt: skip
    named = {header.node for pairs in sealed.values() for _, header in pairs}
    return Restorability(tuple(prospects), () if together else tuple(sorted(named - {node.name for node in nodes})))


def recorded_scheme(texts: Iterable[str]) -> str:
    """Return the scheme of an attempt from the headers of its files. If some ranks have copies, it is that of parity.

    Example:
        xor:4, xor:5 and copy → xor:4, because groups may be larger than named, and a rank without a group has a copy.
    """
    schemes: list[Scheme] = []
    for text in set(texts):
        with contextlib.suppress(ConfigError):
            schemes.append(parse(text))
    best = min(schemes, key=lambda scheme: (not scheme.parity, -scheme.losses, scheme.members), default=None)
    return "none" if best is None else str(best)


@dataclasses.dataclass(frozen=True)
class Survival:
    """The losses of nodes that an attempt survives with its present files."""

    nodes: int
    fatal: tuple[str, ...]
    pairs: int  # number of pairs of nodes; 0 if pairs were not tried
    fatal_pairs: tuple[tuple[str, str], ...]  # although each node of them alone may be lost

    @property
    def surviving_pairs(self) -> int:
        single, good = len(self.fatal), self.nodes - len(self.fatal)
        return self.pairs - single * good - math.comb(single, 2) - len(self.fatal_pairs) if self.pairs else 0

    def __str__(self) -> str:
        """Describe the losses in words.

        Example:
            "any 1 of 4 nodes; 4 of 6 pairs of nodes; not: n0 and n2 together, n1 and n3 together"; "any 1 of 3 nodes
            except n2".
        """
        if self.nodes == 1:
            return f"no node: there is only {self.fatal[0]}"
        if len(self.fatal) == self.nodes:
            return "no node"
        but = f" except {listed(self.fatal, _NAMED)}" if self.fatal else ""
        text = [f"any 1 of {self.nodes} nodes{but}"]
        if good := self.surviving_pairs:
            text.append(f"any 2 of {self.nodes} nodes" if good == self.pairs else
                        f"{good:,} of {self.pairs:,} pairs of nodes")  # fmt: skip
        if self.surviving_pairs and self.fatal_pairs:
            text.append("not: " + listed([f"{a} and {b} together" for a, b in self.fatal_pairs], _NAMED))
        return "; ".join(text)


def survival(nodes: Sequence[Node], of: Prospect) -> Survival:
    """Find the losses that a restorable attempt survives, by trying each of them."""
    inventory = inventory_of(list(nodes)).of(of.attempt)
    numbers = sorted(set(inventory.rows["node"].tolist()))

    def fatal(*lost: int) -> bool:
        rows = inventory.rows
        for node in lost:
            rows = rows[rows["node"] != node]
        return not rows.size or choose(Inventory(rows, inventory.groups), (), WantedStep(of.step)) is None

    single = [node for node in numbers if fatal(node)]
    pairs = 0 if len(numbers) > _PAIRS_OF else math.comb(len(numbers), 2)
    tied = [pair for pair in _tied(inventory) if pairs and not set(pair) & set(single)]
    names = [node.name for node in nodes]
    return Survival(len(numbers), tuple(names[node] for node in single), pairs,
                    tuple((names[a], names[b]) for a, b in tied if fatal(a, b)))  # fmt: skip


def _tied(inventory: Inventory) -> list[tuple[int, int]]:
    """Return pairs of nodes that are the only holders of something. All other pairs may be lost."""
    holders: dict[tuple[str, int, int], set[int]] = {}
    groups: dict[int, set[int]] = {}
    for row in inventory.rows:
        rank, node = int(row["rank"]), int(row["node"])
        if row["kind"] == Kind.SHARE:
            holders.setdefault(("share", int(row["shared_by"]), int(row["number"])), set()).add(node)
        elif row["kind"] == Kind.PARITY:
            groups.setdefault(int(row["group"]), set()).add(node)
        else:
            holders.setdefault(("slot", rank, 0), set()).add(node)
    tied = [nodes for nodes in holders.values() if len(nodes) == 2]
    for number, nodes in groups.items():
        tied.append(nodes | {node for rank in inventory.groups[number] for node in holders.get(("slot", rank, 0), ())})
    return sorted({pair for nodes in tied for pair in itertools.combinations(sorted(nodes), 2)})
