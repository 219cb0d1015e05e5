"""What each operation on a checkpoint costs a rank: counts and bytes of commits, drains and restores, simulated.

The state is a tensor sharded over the nodes. It is restored on the same number of ranks, and on twice as many ranks on
the same nodes.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence

from scale.jobs import COMMITS, PER_NODE, Phase, SimulatedJob, simulated
from scale.meeting import Call

SCHEME, TRANSPORT = "copy", "p2p"
START, COMMIT, DRAIN, RESTORE, LOST = "start", "commit", "drain", "restore", "restore, a slot lost"
OUT_OF_DIRECTORY = "restore, from a directory"
RESHARD, RESHARD_OUT_OF_DIRECTORY = "reshard, a node lost", "reshard, from a directory"
PATHS = (START, COMMIT, DRAIN, RESTORE, LOST, OUT_OF_DIRECTORY, RESHARD, RESHARD_OUT_OF_DIRECTORY)
_MESSAGES = ("Isend", "Rput")
_BEAT = "beat"  # one allreduce a second during a drain, so their number only depends on its duration
_OPENS = ("read", "open", "write")


@dataclasses.dataclass
class Row:
    """What one rank did in one operation. Counts are the larger ones of the two live ranks unless described otherwise.

    Attributes:
        path: the operation, one of `PATHS`.
        cpu_s: CPU seconds of a rank, with the simulation of MPI.
        allreduces: allreduces over the world.
        collectives: all other collectives, including those of the first ranks of the nodes.
        messages, sent_nbytes: messages to single ranks.
        leader_nbytes, rank_nbytes: bytes that the first rank of a node, and any other rank, receive from collectives.
            Neither is rank 0.
        first_nbytes: bytes that rank 0 receives.
        dealt_nbytes: the part of these bytes that any rank receives in an all-to-all of one number a rank.
        files, requests: files that a rank other than rank 0 opens, and its requests to the directory.
        first_files, first_requests: the same for rank 0.
        alone_s: seconds of rank 0 for what it alone does.
    """

    ranks: int
    path: str
    cpu_s: float = 0.0
    allreduces: int = 0
    collectives: int = 0
    messages: int = 0
    sent_nbytes: int = 0
    leader_nbytes: int = 0
    rank_nbytes: int = 0
    first_nbytes: int = 0
    dealt_nbytes: int = 0
    files: int = 0
    requests: int = 0
    first_files: int = 0
    first_requests: int = 0
    alone_s: float = 0.0
    wrong: str = ""


def measure(ranks: int) -> Iterator[Row]:
    """Run all operations with this number of ranks, 8 on a node."""
    yield from as_many(ranks)
    yield from doubled(ranks)


def as_many(ranks: int) -> Iterator[Row]:
    """Start, commit, drain, and restore on the same number of ranks."""
    with simulated(ranks, SCHEME, TRANSPORT, False, cut=True) as job:
        job.directory = job.memory / "directory"
        yield _row(ranks, START, job.start())
        _commit(job)
        yield _row(ranks, COMMIT, job.commit(COMMITS))
        yield _row(ranks, DRAIN, job.drain())
        job.stop()
        yield _restored(ranks, RESTORE, job)
        job.lose(job.live[-1])
        yield _restored(ranks, LOST, job)
        job.forget()
        yield _restored(ranks, OUT_OF_DIRECTORY, job)


def doubled(ranks: int) -> Iterator[Row]:
    """Restore on this number of ranks what half as many saved on the same nodes."""
    with simulated(ranks // 2, SCHEME, TRANSPORT, False, cut=True, per_node=PER_NODE // 2) as half:
        half.directory = half.memory / "directory"
        half.start()
        _commit(half)
        half.commit(COMMITS)
        half.drain()
        half.stop()
        with half.doubled() as job:
            job.lose_node(job.live[-1])
            yield _restored(ranks, RESHARD, job)
        half.forget()
        with half.doubled() as job:
            yield _restored(ranks, RESHARD_OUT_OF_DIRECTORY, job)


def _commit(job: SimulatedJob) -> None:
    for step in range(1, COMMITS):
        job.commit(step)


def _restored(ranks: int, path: str, job: SimulatedJob) -> Row:
    job.start()
    phase, right = job.restore(COMMITS)
    job.stop()
    row = _row(ranks, path, phase)
    row.wrong = "" if right else "a restore did not return the saved step"
    return row


def _row(ranks: int, path: str, phase: Phase) -> Row:
    row = Row(ranks, path, cpu_s=phase.cpu_s, alone_s=phase.alone_s)
    together = [[call for call in calls if call.what not in _MESSAGES and call.comm != _BEAT] for calls in phase.of]
    sent = [[call for call in calls if call.what in _MESSAGES] for calls in phase.of]
    row.allreduces = max(sum(call.what == "Iallreduce" for call in calls) for calls in together)
    row.collectives = max(map(len, together)) - row.allreduces
    row.messages = max(map(len, sent))
    row.sent_nbytes = max(sum(call.nbytes for call in calls) for calls in sent)
    row.first_nbytes = sum(call.received for call in together[0])
    row.leader_nbytes = sum(call.received for call in together[-1])
    row.rank_nbytes = sum(map(_beside_leader, together[-1]))
    row.dealt_nbytes = sum(call.received for call in together[-1] if call.what == "Ialltoall")
    (row.first_files, row.first_requests), (row.files, row.requests) = map(_asked, (phase.asked[0], phase.asked[-1]))
    return row


def _beside_leader(call: Call) -> int:
    """Give the bytes that the other ranks of a node receive if its first rank makes this call.

    Only the first rank takes part in collectives of the first ranks.
    """
    if call.comm == "leaders":
        return 0
    return call.nbytes if call.what == "Ibcast" and not call.received else call.received


def _asked(asked: collections.Counter[tuple[str, str]]) -> tuple[int, int]:
    return len({name for verb, name in asked if verb in _OPENS}), asked.total()


def of_path(rows: Sequence[Row], path: str) -> list[Row]:
    """Give the rows of one operation, ordered by size."""
    return sorted((row for row in rows if row.path == path), key=lambda row: row.ranks)
