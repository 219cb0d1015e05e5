"""Counts the MPI calls of ranks while Checkpointers start, commit, are relaunched and restore."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from scale.jobs import COMMITS, STATE_NBYTES, Phase, simulated
from scale.meeting import Call
from scale.model import sent_per_byte

from mlflash.placement.redundancy_scheme import parse

ALLREDUCES = 3  # aim for a commit
JOBS = (("copy", "p2p", False), ("copy", "rma", False), ("xor:8", "p2p", False), ("rs:6+2", "p2p", False),
        ("rs:6+2", "rma", False), ("copy", "p2p", True))  # fmt: skip
"""Scheme, transport, and whether all ranks hold the same state."""
MOST_LIVE_RANKS = 300_000  # live ranks times ranks of the job, since each live rank holds the tables of a real one
_MESSAGES = ("Isend", "Rput")
_WORLD, _SET = "world", "all"
_NEAR = 0.03  # for headers, tables and the last row of stripes, which is partly filled


@dataclasses.dataclass
class Row:
    """What one rank did. Messages are those of the rank that sent most. Seconds are CPU time, simulation included.

    Attributes:
        live: number of ranks that ran.
        allreduces, of_sharers: collectives of one commit, over the world and among the ranks that share state.
        allreduce_nbytes: bytes of both.
        messages, sent_nbytes: messages of one commit to other ranks of the redundancy group.
        per_byte: bytes sent for each byte of the state.
        steps: messages of each rank in an allreduce by recursive doubling.
        start_s, commit_s, restart_s, restore_s, lost_s: time of a start; of a commit; of a start and a restore after a
            relaunch; of a restore after the files of one rank are lost.
        restore_collectives, restore_received_mb: collectives of a restore, and what a rank receives from them.
        lost_collectives: collectives of a restore after the files of one rank are lost.
        wrong: the contradiction between two numbers. Empty if there is no contradiction.
    """

    ranks: int
    scheme: str
    transport: str
    alike: bool
    live: int = 0
    allreduces: int = 0
    of_sharers: int = 0
    allreduce_nbytes: int = 0
    messages: int = 0
    sent_nbytes: int = 0
    per_byte: float = 0.0
    steps: int = 0
    start_s: float = 0.0
    commit_s: float = 0.0
    restart_s: float = 0.0
    restore_s: float = 0.0
    lost_s: float = 0.0
    restore_collectives: int = 0
    restore_received_mb: float = 0.0
    lost_collectives: int = 0
    wrong: str = ""


def measure(ranks: int, scheme: str, transport: str, alike: bool) -> Row | None:
    """Run a job of this size. Gives None if its live ranks would need too much memory."""
    row = Row(ranks, scheme, transport, alike, steps=math.ceil(math.log2(ranks)))
    with simulated(ranks, scheme, transport, alike) as job:
        row.live = len(job.live)
        if row.live * ranks > MOST_LIVE_RANKS:
            return None
        row.start_s = job.start().cpu_s
        for step in range(1, COMMITS + 1):
            commit = job.commit(step)
        _count_commit(row, commit)
        job.stop()
        if alike:  # phantoms hold no shares, so nothing can be restored
            return row
        row.restart_s = job.start().cpu_s
        restore, right = job.restore(COMMITS)
        row.restore_s, row.restore_collectives = restore.cpu_s, len(collectives(restore.calls))
        row.restore_received_mb = sum(call.received for call in collectives(restore.calls)) / 1e6
        job.stop()
        job.lose(job.live[-1])
        job.start()
        lost, still_right = job.restore(COMMITS)
        row.lost_s, row.lost_collectives = lost.cpu_s, len(collectives(lost.calls))
        job.stop()
        if not (right and still_right):
            row.wrong = "a restore did not return the saved step"
    return row


def collectives(calls: Iterable[Call]) -> list[Call]:
    """Give the calls that are not messages."""
    return [call for call in calls if call.what not in _MESSAGES]


def _count_commit(row: Row, commit: Phase) -> None:
    together = collectives(commit.calls)
    row.allreduces = sum(call.comm == _WORLD for call in together)
    row.of_sharers = sum(call.comm == _SET for call in together)
    row.allreduce_nbytes = sum(call.nbytes for call in together)
    sent = [call for call in commit.busiest if call.what in _MESSAGES]
    row.messages, row.sent_nbytes = len(sent), sum(call.nbytes for call in sent)
    row.per_byte = row.sent_nbytes / STATE_NBYTES
    row.commit_s = commit.cpu_s
    expected = 0.0 if row.alike else sent_per_byte(parse(row.scheme))
    if abs(row.per_byte - expected) > _NEAR:
        row.wrong = f"a rank sent {row.per_byte:.3f} bytes for each byte of its state, the model expects {expected:.3f}"
    if any(call.what != "Iallreduce" for call in together):
        row.wrong = f"a commit called other collectives than allreduces: {sorted({call.what for call in together})}"
    if row.allreduces + row.of_sharers > ALLREDUCES:
        row.wrong = (
            row.wrong or f"a commit took {row.allreduces} + {row.of_sharers} allreduces, not {ALLREDUCES} at most"
        )
