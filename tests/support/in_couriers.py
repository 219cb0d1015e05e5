"""What tests replace in couriers, which are processes: MLFLASH_TEST_REPLACED names functions of this module.

They are called in each courier, at its start. What a replacement does from time to time only, it does while
something is held at its own name (`holds`).
"""

from __future__ import annotations

import mmap
import os
import pickle
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import holds
import numpy as np
import xxhash

NAME = "MLFLASH_TEST_REPLACED"
COUNTS = "MLFLASH_TEST_COUNTS"
"""The path of a file of `Counts`."""
COLLECTIVES = ("Iallreduce", "Iallgather", "Ibcast")
_COUNTED = ("copied", "checked", "into collectives", *COLLECTIVES)


def arm() -> None:
    holds.arm()
    for name in os.environ.get(NAME, "").split():
        globals()[name]()


def reach_into_couriers() -> None:
    """Let the couriers that this process is going to have be held, and what they do be replaced. Not collective."""
    holds.reach_into_couriers()
    os.environ["MLFLASH_TEST_ARMS"] = "in_couriers"


def three_copy_threads() -> None:
    """Take three threads for copies, without measuring how many help."""
    from mlflash.memory import copy_threads

    copy_threads._measured = lambda ranks, least_of: 3


def put_fails() -> None:
    """Let each put of RMA fail."""
    from mlflash.mpi import fabric

    def refuse(*_: object) -> None:
        raise RuntimeError("MPI_ERR_RMA_SYNC")

    fabric.OpenMemory.put = refuse  # type: ignore[method-assign]


# Bytes that change


def changed_after_its_check() -> None:
    """While "changed" is held: change a byte of the own slot after its checksum was made, once."""
    from mlflash.protect import transfer

    really, changed = transfer.Source.check_up_to, list[int]()

    def check_up_to(source: transfer.Source, block: int) -> None:
        really(source, block)
        if holds.happens_at("changed") and not changed:
            source.slot.body(source.extents)[1000] ^= 1
            changed.append(block)

    transfer.ARRIVAL_S = 1.0
    transfer.Source.check_up_to = check_up_to  # type: ignore[method-assign]


def damaged_on_arrival() -> None:
    """While "arrival" is held as "NTH BIT PLACE": change a bit of the n-th chunk that comes, at a place in it."""
    from mlflash.protect import transfer

    really, chunks = transfer._arrived, [0]

    def arrived(incoming: Any, extents: Any, first: int, last: int, window: Any) -> Any:
        nth, bit, place = holds.happens_at("arrival").split() or [0, 0, 0]
        chunks[0] = chunks[0] + 1 if nth else 0
        if nth and chunks[0] == int(nth):
            run = incoming.run(first, last)
            run[int(float(place) * run.nbytes)] ^= 1 << int(bit)
        return really(incoming, extents, first, last, window)

    transfer._arrived = arrived


def disk_fails() -> None:
    """While "disk" is held as an error number: disks of couriers fail with it when they are written."""
    from mlflash.memory import disk_slot

    really = disk_slot.DiskFile.write

    def write(file: disk_slot.DiskFile, start: int, pages: np.ndarray) -> None:
        if number := int(holds.happens_at("disk") or 0):
            raise OSError(number, os.strerror(number))
        really(file, start, pages)

    disk_slot.DiskFile.write = write  # type: ignore[method-assign]


def _changed_when_coded(with_its_check: bool) -> None:
    from mlflash.memory.parity_layout import Unit
    from mlflash.protect.parity import _GroupBlocks

    really = _GroupBlocks.read

    def read(blocks: _GroupBlocks, unit: Unit) -> tuple[np.ndarray, int]:
        raw, check = really(blocks, unit)
        if holds.happens_at("changed") and unit.block == 2:
            raw = raw.copy()
            raw[1000] ^= 1
            check = xxhash.xxh3_64_intdigest(raw.data) if with_its_check else check
        return raw, check

    _GroupBlocks.read = read  # type: ignore[method-assign]


def changed_when_sent_for_parity() -> None:
    """While "changed" is held: send the third block with a byte changed, and the checksum of the block in the slot."""
    _changed_when_coded(with_its_check=False)


def changed_and_checked_when_sent_for_parity() -> None:
    """While "changed" is held: send the third block with a byte changed, and the checksum of what is sent."""
    _changed_when_coded(with_its_check=True)


def damaged_on_its_way() -> None:
    """While "changed" is held: parts that this rank sends and receives do not have their checksums."""
    from mlflash.restore import fetch

    def digest(raw: Any) -> int:
        return 1 if holds.happens_at("changed") else xxhash.xxh3_64_intdigest(raw)

    fetch.xxhash = SimpleNamespace(xxh3_64_intdigest=digest)  # type: ignore[assignment]


# Counts


class Counts:
    """Numbers in a file, which the courier of this process adds to and nobody else."""

    def __init__(self, path: Path):
        path.touch()
        os.truncate(path, 8 * len(_COUNTED))
        with path.open("r+b") as file:
            self._numbers = np.frombuffer(mmap.mmap(file.fileno(), 8 * len(_COUNTED)), dtype=np.int64)
        self._lock = threading.Lock()

    def add(self, name: str, count: int) -> None:
        with self._lock:
            self._numbers[_COUNTED.index(name)] += count

    def all(self) -> Counter[str]:
        return Counter(dict(zip(_COUNTED, self._numbers.tolist(), strict=True)))


def counted() -> None:
    """Count bytes that are copied and checked by any thread, and collectives of the world and what is made from it."""
    from mlflash.mpi import nonblocking

    counts = Counts(Path(os.environ[COUNTS]))
    copy, digest = np.copyto, xxhash.xxh3_64_intdigest
    least_of, gather, broadcast = nonblocking.least_of, nonblocking.gather, nonblocking.broadcast

    def note(name: str, comm: Any, nbytes: int) -> None:
        if comm is not None:
            counts.add(name, 1)
            counts.add("into collectives", nbytes)

    def counting_copy(target: np.ndarray, source: Any, *args: Any) -> None:
        counts.add("copied", target.nbytes)
        copy(target, source, *args)

    def counting_digest(data: Any, *args: Any) -> int:
        counts.add("checked", memoryview(data).nbytes)
        return digest(data, *args)

    def counting_least_of(mpi: Any, comm: Any, values: np.ndarray) -> Any:
        note("Iallreduce", comm, values.nbytes)
        return least_of(mpi, comm, values)

    def counting_gather(mpi: Any, comm: Any, value: Any) -> Any:
        note("Iallgather", comm, len(pickle.dumps(value)))
        return gather(mpi, comm, value)

    def counting_broadcast(comm: Any, value: Any, root: int) -> Any:
        note("Ibcast", comm, len(pickle.dumps(value)) if comm is None or comm.rank == root else 0)
        return broadcast(comm, value, root)

    nonblocking.least_of, nonblocking.gather, nonblocking.broadcast = (
        counting_least_of,
        counting_gather,
        counting_broadcast,
    )
    np.copyto = counting_copy  # type: ignore[assignment]
    xxhash.xxh3_64_intdigest = counting_digest
