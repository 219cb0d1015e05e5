"""What each rank of parity.py does: parity is made and slots are rebuilt, beside a memcpy, an XOR and a raw exchange."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from mpi4py import MPI

from mlflash import erasure
from mlflash.comm import World
from mlflash.config import Config

from mlflash.header import Attempt, Header

from mlflash.layout import PAGE_NBYTES, Extents
from mlflash.node_memory import NodeMemory
from mlflash.placement import place
from mlflash.protect import Protection

from mlflash.scheme import parse
from mlflash.segment import create
from mlflash.shelf import Shelf
from mlflash.slot import Slot

from mlflash.transfer import Source
from mlflash.window import Poke

COMM = MPI.COMM_WORLD
WARM_UP = 2
CHUNK_NBYTES = 4 << 20


class Bench:
    """A slot of this rank, and everything that is done with it."""

    def __init__(self, memory: Path, nbytes: int, repetitions: int, transport: str):
        self.repetitions = repetitions
        self.world = World(COMM, 1, 60.0)
        self.world.start_job(lambda error: None)
        self.memory = NodeMemory(str(memory), f"parity-{transport}", COMM.rank)
        self.transport = transport
        if transport == "rma":
            self.world.poke = Poke(self.world)
        config = Config(job="parity", transport=transport)
        self.extents = Extents(PAGE_NBYTES, nbytes - PAGE_NBYTES, config.block_nbytes)
        self.config = config
        self.slot, self.arrived = (self.filled(self.extents.nbytes) for _ in range(2))
        self.slot.body(self.extents)[:] = np.random.default_rng(COMM.rank).integers(0, 256, nbytes, dtype=np.uint8)
        self.generation = 0

    def filled(self, nbytes: int) -> Slot:
        slot = Slot(create(self.memory, nbytes))
        assert slot.segment is not None
        slot.segment.prefault()
        return slot

    def time(self, actions: Mapping[str, Callable[[], object]]) -> dict[str, np.ndarray]:
        """Seconds of the slowest rank, by name; all actions in turn, again and again."""
        rounds = []
        for _ in range(WARM_UP + self.repetitions):
            seconds = []
            for action in actions.values():
                COMM.Barrier()
                start = time.perf_counter()
                action()
                seconds.append(time.perf_counter() - start)
            slowest = np.empty(len(seconds))
            COMM.Allreduce(np.array(seconds), slowest, MPI.MAX)
            rounds.append(slowest)
        return dict(zip(actions, np.array(rounds[WARM_UP:]).T, strict=True))

    def memcpy(self) -> None:
        np.copyto(self.arrived.body(self.extents), self.slot.body(self.extents))

    def xor(self) -> None:
        into, source = self.arrived.body(self.extents).view("<u8"), self.slot.body(self.extents).view("<u8")
        np.bitwise_xor(into, source, out=into)

    def exchange(self) -> None:
        """Send the bytes to the next rank and receive those of the one before, in chunks, unchecked."""
        mine, theirs = self.slot.body(self.extents), self.arrived.body(self.extents)
        to, come = (COMM.rank + 1) % COMM.size, (COMM.rank - 1) % COMM.size
        requests = []
        for at in range(0, mine.nbytes, CHUNK_NBYTES):
            requests.append(COMM.Irecv([theirs[at : at + CHUNK_NBYTES], MPI.BYTE], come))
            requests.append(COMM.Isend([mine[at : at + CHUNK_NBYTES], MPI.BYTE], to))
        MPI.Request.Waitall(requests)

    def scheme(self, text: str) -> Callable[[], None]:
        """Give what makes the parity of all slots, checksums at both ends and all."""
        protection = Protection(self.world, self.config, place(self.world.topology, parse(text)))
        shelf = Shelf(self.memory, protection.owners)
        for owner, nbytes in protection.inbox_nbytes([self.extents.nbytes] * COMM.size).items():
            shelf.inbox[owner][:] = [self.filled(nbytes) for _ in range(2)]
        protection.open_windows(shelf)

        def protect() -> None:
            self.generation += 1
            attempt = Attempt(b"b" * 16, self.generation)

            def header(check: int) -> Header:
                return Header(attempt, 1, COMM.rank, COMM.size, COMM.rank, 0, 100, self.extents, check, 0, "n", text, "p",
                              protection.group)  # fmt: skip

            protection.offer(shelf, self.extents)
            source = Source(self.slot, self.extents, header)
            assert protection.protect(shelf, source, attempt)
            shelf.release(attempt, self.slot, True)

        return protect

    def rebuild(self, losses: int) -> Callable[[], None]:
        """Give what rebuilds the slots of the first ranks."""
        group = ParityGroup(tuple(range(COMM.size)), losses, ((0, 0),) * COMM.size)
        raise NotImplementedError(group)


def main() -> None:
    out, memory, nbytes, repetitions, transport = sys.argv[1:]
    bench = Bench(Path(memory), int(nbytes), int(repetitions), transport)
    actions = {"memcpy": bench.memcpy, "XOR loop": bench.xor, "raw exchange": bench.exchange}
    for text in (f"xor:{COMM.size}", f"rs:{COMM.size - 2}+2", "copy"):
        actions[text] = bench.scheme(text)
    seconds = bench.time(actions)
    if COMM.rank == 0:
        with Path(out).open("a") as file:
            for name, samples in seconds.items():
                row = {"what": name, "seconds": samples.tolist(), "library": erasure.library()}
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
