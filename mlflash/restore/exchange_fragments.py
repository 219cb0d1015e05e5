"""Parts of tensors → the ranks that ask for them: their holder packs them, and the receiver checks them.

Each rank tells the others what it needs from them, and every part travels in runs of at most a chunk. Parts of a shard
that is cut along another dimension are strided: the sender packs them, because a Get would need a datatype for each.
"""

from __future__ import annotations

import collections
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from ..courier.state import CourierState
from ..courier.wanted_parts import WantedPart, items
from ..mpi.nonblocking import Operation, done
from ..mpi.world import World
from ..protect import transfer
from ..state import layout
from ..state.leaves import Entry
from ..state.rebuild import Read
from ..state.shards import box, cut

_ASK, _BODY, _CHECK = 41, 42, 43
_DEPTH = 2  # runs in flight between two ranks


def exchange(
    context: CourierState, has: Mapping[int, tuple[Read, Sequence[Entry]]], asked: Mapping[int, Sequence[WantedPart]]
) -> bool:
    """Send what others ask for from what this rank ``has`` of old ranks, and receive what this rank asks for.

    Return whether all of that arrived whole.
    """
    world = context.world
    if world.world is None:
        return True
    questions = {
        rank: pickle.dumps([(p.rank, p.number, p.source, p.shape) for p in those]) for rank, those in asked.items()
    }
    lengths, theirs = np.zeros(world.size, dtype=np.int64), np.zeros(world.size, dtype=np.int64)
    for rank, text in questions.items():
        lengths[rank] = len(text)
    world.finish(world.world.Ialltoall(lengths, theirs))
    arrived = {int(rank): np.empty(int(theirs[rank]), dtype=np.uint8) for rank in np.flatnonzero(theirs)}
    requests = [world.data.Irecv([text, world.mpi.BYTE], rank, _ASK) for rank, text in arrived.items()]
    requests += [world.data.Isend([np.frombuffer(text, np.uint8), world.mpi.BYTE], rank, _ASK)
                 for rank, text in questions.items()]  # fmt: skip
    world.finish(*requests)
    work = [_send(world, rank, pickle.loads(text.tobytes()), has) for rank, text in arrived.items()]
    work += [_receive(world, rank, those) for rank, those in asked.items()]
    world.waiting_for = sorted({*arrived, *asked})
    good = world.drive(work)
    world.waiting_for = ()
    return all(good)


def _send(world: World, peer: int, wanted: Sequence[tuple[int, int, Any, Any]],
          has: Mapping[int, tuple[Read, Sequence[Entry]]]) -> Operation:  # fmt: skip
    sent: collections.deque[tuple[Any, ...]] = collections.deque()
    for rank, number, source, shape in wanted:
        read, entries = has[rank]
        part = items(read(entries[number]), entries[number])[box(source, shape)]
        for run in _runs(part):
            raw = np.ascontiguousarray(run).reshape(-1)
            check = np.array([xxhash.xxh3_64_intdigest(raw.data)], dtype="<u8")
            body = world.data.Isend([raw, world.mpi.BYTE], peer, _BODY)
            sent.append((body, world.data.Isend([check, world.mpi.BYTE], peer, _CHECK)))
            yield True
            while len(sent) > _DEPTH:
                for request in sent.popleft():
                    yield from done(request)
    for requests in sent:
        for request in requests:
            yield from done(request)
    return True


def _receive(world: World, peer: int, wanted: Sequence[WantedPart]) -> Operation:
    runs = (run for wanted_part in wanted for run in _runs(wanted_part.target))
    posted: collections.deque[tuple[np.ndarray, np.ndarray, np.ndarray, Any, Any]] = collections.deque()
    good = True
    while True:
        while len(posted) < _DEPTH and (run := next(runs, None)) is not None:
            raw, check = np.empty(run.nbytes, dtype=np.uint8), np.empty(1, dtype="<u8")
            body = world.data.Irecv([raw, world.mpi.BYTE], peer, _BODY)
            posted.append((run, raw, check, body, world.data.Irecv([check, world.mpi.BYTE], peer, _CHECK)))
        if not posted:
            return good
        target, raw, check, body, told = posted.popleft()
        yield from done(body)
        yield from done(told)
        good &= xxhash.xxh3_64_intdigest(raw.data) == int(check[0])
        target[...] = raw.reshape(target.shape)
        yield True


def _runs(part: np.ndarray) -> Iterator[np.ndarray]:
    """Cut ``(*shape, item bytes)`` into runs of at most a chunk."""
    for offset, shape in cut(part.shape[:-1], part.shape[-1], transfer.CHUNK_BLOCKS * layout.BLOCK_NBYTES):
        yield part[box(offset, shape)]
