"""What the nodes hold → which attempt to restore, from where, and who takes over which file.

Pure but for `scan`: every rank computes the same choice from the same table.
"""

from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from .errors import CorruptSlot, UnsafePath
from .header import RECORD_NBYTES, RESTORES_START, Attempt, read_record, unpack
from .node_memory import NodeMemory

FOUND = np.dtype(
    [("generation", "<u8"), ("run_0", "<u8"), ("run_1", "<u8"), ("step", "<i8"), ("nbytes", "<u8"),
     ("rank", "<u4"), ("world_size", "<u4"), ("node", "<u4"), ("file", "<u4"), ("restores", "u1")]
)  # fmt: skip
"""One sealed slot file: 57 bytes, so that 16,384 ranks with four files each fit into 4 MB."""
_RUN_ID = struct.Struct("<QQ")


@dataclasses.dataclass(frozen=True)
class Choice:
    """An attempt that can be restored, and a file of it for every rank.

    ``source[r]`` is the ``(node, file number)`` of rank r's slot; ``restores`` says how many runs have restored the
    attempt so far.
    """

    attempt: Attempt
    step: int
    world_size: int
    source: tuple[tuple[int, int], ...]
    restores: int = 0


def file_number(name: str) -> int:
    """``file_number("slot-0007") == 7``."""
    return int(name.removeprefix("slot-"))


def file_name(number: int) -> str:
    """``file_name(7) == "slot-0007"``."""
    return f"slot-{number:04d}"


def scan(memory: NodeMemory, node: int) -> np.ndarray:
    """List the sealed slots of this node by their headers, as an array of `FOUND`. Not collective.

    Files that are not private files of this user are left alone, as if they were not there.
    """
    rows = []
    for name in memory.slot_names():
        try:
            fd = memory.open(name, os.O_RDONLY)
        except (UnsafePath, FileNotFoundError):
            continue
        try:
            page = os.pread(fd, RESTORES_START + RECORD_NBYTES, 0)
            nbytes = os.fstat(fd).st_size
            header = unpack(page)
        except CorruptSlot:
            continue
        finally:
            os.close(fd)
        if header.extents.nbytes <= nbytes:
            restores = read_record(page, RESTORES_START, header.attempt) or 0
            rows.append((
                header.attempt.generation, *_RUN_ID.unpack(header.attempt.run_id), header.step, nbytes,
                header.rank, header.world_size, node, file_number(name), min(restores, 255),
            ))  # fmt: skip
    return np.array(rows, dtype=FOUND)


def attempts(found: np.ndarray) -> list[tuple[Attempt, int, int]]:
    """List the attempts in a table as ``(attempt, step, world size)``, newest first."""
    unique = np.unique(found[["generation", "run_0", "run_1", "step", "world_size"]]).tolist()
    return [(Attempt(_RUN_ID.pack(a, b), g), step, size) for g, a, b, step, size in reversed(unique)]


def rows_of(found: np.ndarray, attempt: Attempt) -> np.ndarray:
    """The rows of one attempt."""
    first, second = _RUN_ID.unpack(attempt.run_id)
    mine = (found["generation"] == attempt.generation) & (found["run_0"] == first) & (found["run_1"] == second)
    rows: np.ndarray = found[mine]
    return rows


def choose(found: np.ndarray, node_of: Sequence[int], step: int | None = None, skip_stuck: int = 0) -> Choice | None:
    """Choose the newest attempt of which there is a slot for every rank.

    Whether it was committed is not asked: an attempt that is sealed everywhere rolls forward.

    Args:
        found: all sealed slots of all nodes.
        node_of: node of each rank now; a slot on the rank's own node is preferred, then the lowest node.
        step: only attempts of this step.
        skip_stuck: pass over attempts that so many runs have restored, where there is an older one; 0: never.
    """
    newest_stuck: Choice | None = None
    for attempt, its_step, world_size in attempts(found):
        if step is not None and its_step != step:
            continue
        source: dict[int, tuple[int, int]] = {}
        for row in np.sort(rows_of(found, attempt), order=["rank", "node", "file"]):
            rank, place = int(row["rank"]), (int(row["node"]), int(row["file"]))
            at_home = rank < len(node_of) and node_of[rank] == place[0]
            if rank not in source or (at_home and source[rank][0] != place[0]):
                source[rank] = place
        if len(source) < world_size or (newest_stuck is not None and world_size != newest_stuck.world_size):
            continue
        restores = int(rows_of(found, attempt)["restores"].max())
        choice = Choice(attempt, its_step, world_size, tuple(source[rank] for rank in range(world_size)), restores)
        if not skip_stuck or restores < skip_stuck:
            return choice
        newest_stuck = newest_stuck or choice
    return newest_stuck


@dataclasses.dataclass
class Files:
    """The files that a rank takes over: numbers, or None where there is none yet.

    The first of each pair is the one for the attempt that was chosen, the second for the next save.
    """

    own: list[int | None]
    inbox: dict[int, list[int | None]]


def assign(
    found: np.ndarray,
    names: Sequence[str],
    node: int,
    chosen: Attempt | None,
    same_ranks: bool,
    ranks_here: Sequence[int],
    owners: Sequence[Sequence[int]],
) -> tuple[dict[int, Files], list[int]]:
    """Share the files of a node out among its ranks, so that ranks that moved do not double the memory.

    A file of the chosen attempt goes to the rank whose state or whose partner's copy it is; the others of that
    attempt come last, since they must not be written until the redundancy is whole in its new places.

    Args:
        found: all sealed slots of all nodes.
        names: all slot files of this node, sealed or not.
        node: index of this node.
        chosen: the attempt that must be kept.
        same_ranks: whether that attempt's ranks are the ranks of today (same world size).
        ranks_here: ranks of this node.
        owners: for each rank, the ranks whose copies it holds.

    Returns:
        The files of each rank here, and the numbers of those left over (to be deleted once the redundancy is
        whole in its new places).
    """
    here = found[found["node"] == node]
    rank_in = {int(row["file"]): int(row["rank"]) for row in here}
    kept = {int(row["file"]) for row in (rows_of(here, chosen) if chosen else here[:0])}
    unused = sorted(file_number(name) for name in names)

    def take(wanted_rank: int | None, allowed: Any) -> int | None:
        for number in unused:
            if allowed(number) and (wanted_rank is None or rank_in.get(number) == wanted_rank):
                unused.remove(number)
                return number
        return None

    files = {rank: Files([None, None], {q: [None, None] for q in owners[rank]}) for rank in ranks_here}
    if same_ranks:
        for rank in ranks_here:
            files[rank].own[0] = take(rank, kept.__contains__)
        for rank in ranks_here:
            for owner, pair in files[rank].inbox.items():
                pair[0] = take(owner, kept.__contains__)
    for index in (0, 1):
        for rank in ranks_here:
            for owner, pair in [(rank, files[rank].own), *files[rank].inbox.items()]:
                if pair[index] is None:
                    pair[index] = take(owner, lambda n: n not in kept)
        for rank in ranks_here:
            for pair in [files[rank].own, *files[rank].inbox.values()]:
                if pair[index] is None:
                    pair[index] = take(None, lambda n: n not in kept)
    for rank in ranks_here:
        for pair in [files[rank].own, *files[rank].inbox.values()]:
            if pair[1] is None and pair[0] not in kept:  # one of the two can always be written
                pair[1] = take(None, kept.__contains__)
    return files, unused
