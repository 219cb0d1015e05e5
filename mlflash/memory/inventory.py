"""What the nodes hold: their sealed files as one table, what was committed, and which of it a caller asks for.

Each node lists its own files, and all tables are joined. Nothing but a verdict is ever written here.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from ..errors import CorruptSlot, UnsafePath
from ..text import listed, named
from .node_directory import NodeDirectory, file_name, file_number
from .slot import (
    COMMIT_START,
    MAGIC,
    RECORD_NBYTES,
    RESTORES_START,
    VERDICT_START,
    Attempt,
    Header,
    Kind,
    Verdict,
    any_record,
    pack_record,
    read_record,
    read_verdict,
    unpack,
)

FOUND = np.dtype(
    [("generation", "<u8"), ("run_0", "<u8"), ("run_1", "<u8"), ("step", "<i8"), ("rank", "<u4"),
     ("world_size", "<u4"), ("node", "<u4"), ("file", "<u4"), ("group", "<u4"), ("shared_by", "<i4"), ("kind", "u1"),
     ("number", "u1"), ("shares", "u1"), ("restores", "u1"), ("verdict", "u1")]
)  # fmt: skip
"""One sealed file: 61 bytes, so that 16,384 ranks with four files each fit into 4 MB.

``number``: how many may be lost, of parity; which share, of shared state, and ``shares`` how many there are. ``group``:
index of a parity group. ``shared_by``: the set of ranks whose shared state it is, or which this slot needs; -1: none.
``verdict``: see `slot.Verdict`.
"""
_ATTEMPT = ["generation", "run_0", "run_1", "step", "world_size"]
_RUN_ID = struct.Struct("<QQ")
_COUNT = struct.Struct("<Q")

Place = tuple[int, int]
"""Node and file number."""


@dataclasses.dataclass(frozen=True)
class Inventory:
    """Sealed files of some nodes."""

    rows: np.ndarray  # one each, `FOUND`
    # the ranks of parity groups; rows["group"] of a parity file is an index into them
    groups: tuple[tuple[int, ...], ...] = ()

    def attempts(self) -> list[tuple[Attempt, int, int]]:
        """List the attempts as ``(attempt, step, world size)``, newest first."""
        # Sort by columns: np.unique compares rows field by field, which takes twenty times as long.
        order = np.lexsort([self.rows[name] for name in reversed(_ATTEMPT)])
        rows = self.rows[_ATTEMPT][order]
        unique = rows[np.concatenate([rows[:1] == rows[:1], rows[1:] != rows[:-1]])].tolist()
        return [(Attempt(_RUN_ID.pack(a, b), g), step, size) for g, a, b, step, size in reversed(unique)]

    def of(self, attempt: Attempt) -> Inventory:
        first, second = _RUN_ID.unpack(attempt.run_id)
        rows = self.rows
        of_attempt = (rows["generation"] == attempt.generation) & (rows["run_0"] == first) & (rows["run_1"] == second)
        return Inventory(rows[of_attempt], self.groups)

    @property
    def verdict(self) -> Verdict:
        return Verdict(int(self.rows["verdict"].max(initial=0)))

    def since(self, generation: int) -> Inventory:
        return Inventory(self.rows[self.rows["generation"] >= generation], self.groups)

    def on(self, node: int) -> Inventory:
        return Inventory(self.rows[self.rows["node"] == node], self.groups)

    def without(self, places: Iterable[Place]) -> Inventory:
        rows = self.rows
        for node, file in places:
            rows = rows[(rows["node"] != node) | (rows["file"] != file)]
        return Inventory(rows, self.groups)


def join(parts: Sequence[Inventory]) -> Inventory:
    """Put the inventories of several nodes together."""
    # Join the bytes at once: NumPy takes longer to inspect the fields of 16,384 small arrays than to copy all their
    # data.
    rows = np.frombuffer(bytearray(b"".join([part.rows.tobytes() for part in parts])), dtype=FOUND)
    groups: dict[tuple[int, ...], int] = {}
    every = itertools.chain.from_iterable(part.groups for part in parts)
    number_of = np.array([groups.setdefault(group, len(groups)) for group in every], dtype="<u4")
    first = np.cumsum([0, *(len(part.groups) for part in parts)])[:-1]
    parity = rows["kind"] == Kind.PARITY
    first_of_row = np.repeat(first, [part.rows.size for part in parts])[parity]
    rows["group"][parity] = number_of[first_of_row + rows["group"][parity]]
    return Inventory(rows, tuple(groups))


def encode(inventory: Inventory) -> bytes:
    """Encode an inventory, to send it to the other nodes.

    It is encoded column by column and compressed, because most of it repeats: the files of 8 ranks with rs:6+2 take 270
    bytes instead of the 2,400 of a pickle, and those of 16,384 ranks 0.5 MB instead of 5.
    """
    columns = np.frombuffer(inventory.rows.tobytes(), dtype=np.uint8).reshape(-1, FOUND.itemsize).T.tobytes()
    groups = np.array([word for group in inventory.groups for word in (len(group), *group)], dtype="<u4").tobytes()
    return zlib.compress(_COUNT.pack(inventory.rows.size) + columns + groups, 1)


def decode(packed: bytes) -> Inventory:
    """Decode what `encode` returned."""
    raw = zlib.decompress(packed)
    end = _COUNT.size + FOUND.itemsize * _COUNT.unpack_from(raw)[0]
    columns = np.frombuffer(raw[_COUNT.size : end], dtype=np.uint8).reshape(FOUND.itemsize, -1)
    words = iter(np.frombuffer(raw[end:], dtype="<u4").tolist())
    groups = tuple(tuple(itertools.islice(words, length)) for length in words)
    return Inventory(np.frombuffer(columns.T.tobytes(), dtype=FOUND), groups)


def first_pages(memory: NodeDirectory) -> Iterator[tuple[str, bytes, int]]:
    """Return for each slot file of this node its name, header and records as they are, and its size."""
    for name in memory.slot_names():
        try:
            fd = memory.open(name, os.O_RDONLY)
        except (UnsafePath, FileNotFoundError):
            continue
        try:
            page, nbytes = os.pread(fd, VERDICT_START + RECORD_NBYTES, 0), os.fstat(fd).st_size
        finally:
            os.close(fd)
        yield name, page, nbytes


def scan(memory: NodeDirectory, node: int) -> Inventory:
    """List the sealed files of this node by their headers; files that are not private to this user are ignored."""
    sealed = []
    for name, page, nbytes in first_pages(memory):
        try:
            header = unpack(page)
        except CorruptSlot:
            continue
        if header.extents.nbytes <= nbytes:
            restores = read_record(page, RESTORES_START, header.attempt) or 0
            sealed.append((name, header, restores, read_verdict(page, header.attempt)))
    return of_headers(sealed, node)


def of_headers(sealed: Iterable[tuple[str, Header, int, int]], node: int) -> Inventory:
    """List sealed files of a node: for each, name and header, how many runs have restored it, and its verdict."""
    rows = []
    groups: dict[tuple[int, ...], int] = {}
    for name, header, restores, verdict in sealed:
        kind = header.kind
        group = groups.setdefault(header.group, len(groups)) if kind is Kind.PARITY else 0
        rows.append((
            header.attempt.generation, *_RUN_ID.unpack(header.attempt.run_id), header.step, header.rank,
            header.world_size, node, file_number(name), group, header.shared_by, kind,
            header.share if kind is Kind.SHARE else header.parities, len(header.group), min(restores, 255), verdict,
        ))  # fmt: skip
    return Inventory(np.array(rows, dtype=FOUND), tuple(groups))


def write_verdict(memory: NodeDirectory, step: int, verdict: Verdict) -> set[Attempt]:
    """Write a verdict into all sealed files of this node that hold a step; return the attempts that they hold.

    A live job may write such a file at the same time: then the record belongs to an attempt that is no
    longer in the file, and has no effect.
    """
    attempts = set()
    for name, page, _ in first_pages(memory):
        try:
            header = unpack(page)
        except CorruptSlot:
            continue
        if header.step != step:
            continue
        attempts.add(header.attempt)
        try:
            fd = memory.open(name, os.O_RDWR)
        except FileNotFoundError:
            continue
        try:
            os.pwrite(fd, pack_record(VERDICT_START, header.attempt, verdict, time.time_ns()), VERDICT_START)
        finally:
            os.close(fd)
    return attempts


# A receipt in any file of an attempt records that it was committed: a receipt of its commit, or of a run that restored
# it. A save that died before its first receipt was never reported as committed. If every rank had sealed its slot, it
# is nevertheless rolled forward; otherwise it counts as nothing.


MOST_STEPS = 16
"""Steps of which it is said why they cannot be restored."""
_NAMED = 8


@dataclasses.dataclass(frozen=True)
class Trace:
    """A file in the memory of a node that holds something, or did before it was damaged."""

    place: Place
    # attempt, step: what it holds, by its header or otherwise by its receipt; None and -1 if neither can be read
    attempt: Attempt | None
    step: int
    committed: bool  # whether it has a receipt
    header: Header | None  # its header; None if that is damaged
    damage: str  # what is wrong with it; "" if its header is good
    verdict: Verdict = Verdict.UNKNOWN

    @property
    def generation(self) -> int:
        """The generation of what it holds; -1 if that cannot be read."""
        return -1 if self.attempt is None else self.attempt.generation


def scan_traces(memory: NodeDirectory, node: int) -> list[Trace]:
    """List the files of this node that hold something, including damaged ones."""
    traces = []
    for name, page, nbytes in first_pages(memory):
        commit, restores = any_record(page, COMMIT_START), any_record(page, RESTORES_START)
        header, damage = None, ""
        try:
            header = unpack(page)
            if header.extents.nbytes > nbytes:
                damage = f"it has {nbytes:,} bytes of {header.extents.nbytes:,}"
        except CorruptSlot as error:  # a slot that is being written has neither magic nor receipt
            if commit is None and page[: len(MAGIC)] != MAGIC:
                continue
            damage = error.message
        attempt = header.attempt if header is not None else commit[0] if commit is not None else None
        step = header.step if header is not None else commit[1] if commit is not None else -1
        committed = attempt is not None and any(receipt and receipt[0] == attempt for receipt in (commit, restores))
        verdict = Verdict.UNKNOWN if attempt is None else read_verdict(page, attempt)
        traces.append(Trace((node, file_number(name)), attempt, step, committed, header, damage, verdict))
    return traces


def committed_attempts(traces: Iterable[Trace]) -> set[Attempt]:
    """The attempts that have a receipt."""
    return {trace.attempt for trace in traces if trace.committed and trace.attempt is not None}


def fresh_floor(traces: Iterable[Trace], mark: int) -> int:
    """The generation from which a fresh start looks: newer than everything without its mark."""
    marks_of: dict[Attempt, set[int]] = {}
    for trace in traces:
        if trace.attempt is not None:
            marks_of.setdefault(trace.attempt, set()).update([] if trace.header is None else [trace.header.mark])
    ours = [attempt.generation for attempt, marks in marks_of.items() if mark in marks]
    others = [attempt.generation for attempt, marks in marks_of.items() if marks - {mark}]
    # Some attempts have no readable header. If they are newer than our oldest one, they are ours, too.
    unknown = [attempt.generation for attempt, marks in marks_of.items() if not marks]
    others += [generation for generation in unknown if not any(known < generation for known in ours)]
    return max(others, default=-1) + 1


def why_unrestorable(traces: Sequence[Trace], rejected: Mapping[Place, str], nodes: Sequence[str]) -> dict[int, str]:
    """Return for each committed step why it cannot be restored, newest first; ``rejected``: what else is damaged."""
    reasons: dict[int, str] = {}
    for attempt in sorted(committed_attempts(traces), key=lambda attempt: attempt.generation, reverse=True):
        of_attempt = [trace for trace in traces if trace.attempt == attempt]
        if of_attempt[0].step not in reasons and len(reasons) < MOST_STEPS:
            reasons[of_attempt[0].step] = _why(of_attempt, traces, rejected, nodes)
    return reasons


def _why(of_attempt: Sequence[Trace], traces: Sequence[Trace], rejected: Mapping[Place, str], nodes: Sequence[str]
         ) -> str:  # fmt: skip
    wrong = {trace.place: trace.damage or rejected.get(trace.place, "") for trace in of_attempt}
    headers = [trace.header for trace in of_attempt if trace.header is not None]
    of_slots = [(trace.header.rank, wrong[trace.place]) for trace in of_attempt
                if trace.header and trace.header.kind is Kind.SLOT]  # fmt: skip
    slots = {rank for rank, why in of_slots if not why}
    size = max((header.world_size for header in headers), default=0)
    missing = {*range(size)} - {rank for rank, _ in of_slots}
    reasons = []
    if missing:
        homes = sorted({trace.header.node for trace in traces if trace.header and trace.header.rank in missing})
        others = f"what is here is of ranks that were on {listed(sorted({h.node for h in headers}), _NAMED)}"
        where = f"they were on {listed(homes, _NAMED)}" if homes else others
        reasons.append(f"no slot and no copy of {named(missing)} of {size} is on the nodes that are here: {where}")
    parities = {header.group: header.parities for header in headers if header.kind is Kind.PARITY}
    for group, losses in sorted(parities.items()):
        if lost := {*group} - slots:
            reasons.append(f"{len(lost)} of the {len(group)} {named(group)} that protect each other have no "
                        f"slot; at most {losses} may be without")  # fmt: skip
    bad = [f"{file_name(place[1])} on {nodes[place[0]]}: {why}" for place, why in sorted(wrong.items()) if why]
    reasons += bad[:_NAMED] + ([f"{len(bad) - _NAMED} more files are damaged"] if len(bad) > _NAMED else [])
    if not reasons and any(trace.verdict is Verdict.BAD for trace in of_attempt):
        return "it was marked bad"
    return "; ".join(reasons) or "no node that is here has a share of the tensors that ranks hold alike"


@dataclasses.dataclass(frozen=True)
class WantedStep:
    """What a restore asks for: the newest checkpoint that meets all of this.

    A checkpoint that was marked bad is only used if its step is asked for.
    """

    step: int | None = None  # it has this step; None: any step
    before: int | None = None  # its step is smaller than this; None: any step
    # its values have passed their checks, and training continued from it without anything suspect
    certified: bool = False

    @property
    def is_newest(self) -> bool:
        return self == NEWEST

    def fits_step(self, step: int) -> bool:
        return self.step in (None, step) and (self.before is None or step < self.before)

    def fits(self, step: int, verdict: Verdict) -> bool:
        if not self.fits_step(step) or (self.step is None and verdict is Verdict.BAD):
            return False
        return not self.certified or verdict.is_certified

    def __str__(self) -> str:
        conditions = ["certified"] * self.certified + ([] if self.before is None else [f"before step {self.before}"])
        return ", ".join(conditions) if self.step is None else f"step {self.step}"


NEWEST = WantedStep()
"""Whatever was saved last."""
