"""The program of each rank: it times parity, rebuilding of slots, a memcpy, an XOR loop and a raw exchange."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from bench.aims import MEMCPY, REDSET
from bench.clock import Bench
from bench.rows import Samples, row
from mpi4py import MPI

from mlflash.config import Config
from mlflash.memory.node_directory import NodeDirectory
from mlflash.memory.parity_file import read_heads
from mlflash.memory.parity_layout import Stripes
from mlflash.memory.shared_memory_segment import create
from mlflash.memory.slot import Slot, Use
from mlflash.memory.slot_header import Attempt, Header
from mlflash.memory.slot_pool import SlotPool
from mlflash.mpi.rma_windows import Poke
from mlflash.mpi.world import World
from mlflash.placement.protection_groups import place
from mlflash.placement.redundancy_scheme import parse
from mlflash.redundancy import erasure_codes
from mlflash.redundancy.parity_exchange import ParityExchange, roles_of
from mlflash.redundancy.protection import Protection
from mlflash.redundancy.slot_transfer import Source
from mlflash.restoring.rebuild_from_parity import Repair, RepairedBlocks
from mlflash.startup.choose_checkpoint import ParityGroup
from mlflash.state import layout
from mlflash.state.layout import PAGE_NBYTES, Extents

COMM = MPI.COMM_WORLD
EXCHANGE, XOR = "raw exchange", "xor"
REDSET_RATE = {"xor": 1.20e9, "rs": 0.46e9}  # published rate of LLNL's redset: bytes per second of all slots together
EXCHANGES, XORS = 2.0, 1.5  # aims: xor over a raw exchange, and rs over xor, at most
CHUNK_NBYTES = 4 << 20


class Slots:
    """A slot of this rank, and all actions on it that are timed."""

    def __init__(self, memory: Path, nbytes: int, transport: str):
        self.world = World(COMM, 1, 60.0).connect()
        self.world.start_job(lambda error: None)
        self.memory = NodeDirectory(str(memory), f"parity-{transport}", COMM.rank)
        self.transport = transport
        if transport == "rma":
            self.world.poke = Poke(self.world)
        config = Config(job="parity", transport=transport)
        self.extents = Extents(PAGE_NBYTES, nbytes - PAGE_NBYTES, layout.BLOCK_NBYTES)
        self.config = config
        self.slot, self.arrived = (self.filled(self.extents.nbytes) for _ in range(2))
        self.slot.body(self.extents)[:] = np.random.default_rng(COMM.rank).integers(0, 256, nbytes, dtype=np.uint8)
        self.generation = 0
        self.window = MPI.Win.Create(self.arrived.body(self.extents), 1, comm=COMM)

    def filled(self, nbytes: int) -> Slot:
        slot = Slot(create(self.memory, nbytes))
        assert slot.segment is not None
        slot.segment.prefault()
        return slot

    def memcpy(self) -> None:
        np.copyto(self.arrived.body(self.extents), self.slot.body(self.extents))

    def xor(self) -> None:
        into, source = self.arrived.body(self.extents).view("<u8"), self.slot.body(self.extents).view("<u8")
        np.bitwise_xor(into, source, out=into)

    def exchange(self) -> None:
        """Send the bytes to the next rank and receive those of the previous rank, in chunks, without checksums."""
        mine, theirs = self.slot.body(self.extents), self.arrived.body(self.extents)
        to, come = (COMM.rank + 1) % COMM.size, (COMM.rank - 1) % COMM.size
        requests = []
        for at in range(0, mine.nbytes, CHUNK_NBYTES):
            requests.append(COMM.Irecv([theirs[at : at + CHUNK_NBYTES], MPI.BYTE], come))
            requests.append(COMM.Isend([mine[at : at + CHUNK_NBYTES], MPI.BYTE], to))
        MPI.Request.Waitall(requests)

    def reduce_scatter(self) -> None:
        """Let MPI make the XOR of all slots, a share on each rank. No rotation, no checksums."""
        words = self.slot.body(self.extents).view("<u8")
        share = words.size // COMM.size
        COMM.Reduce_scatter_block([words[: share * COMM.size], MPI.UINT64_T],
                                  [self.arrived.body(self.extents).view("<u8")[:share], MPI.UINT64_T],
                                  MPI.BXOR)  # fmt: skip

    def accumulate(self) -> None:
        """Let MPI XOR a share of this rank's slot into the memory of each other rank. No checksums."""
        words = self.slot.body(self.extents).view("<u8")
        share, others = words.size // (COMM.size - 1), [rank for rank in range(COMM.size) if rank != COMM.rank]
        self.window.Fence()
        for nth, peer in enumerate(others):
            mine = words[nth * share : (nth + 1) * share]
            for at in range(0, share, CHUNK_NBYTES // 8):
                part = mine[at : at + CHUNK_NBYTES // 8]
                self.window.Accumulate([part, MPI.UINT64_T], peer, [at * 8, part.size, MPI.UINT64_T], MPI.BXOR)
        self.window.Fence()

    def scheme(self, text: str) -> tuple[Callable[[], None], Callable[[], None] | None]:
        """Return a function that protects all slots, with checksums, and one that rebuilds as many as may be lost."""
        protection = Protection(
            self.world, place(self.world.topology, parse(text)), self.config.transport, self.config.job
        )
        pool = SlotPool(self.memory, protection.owners)
        for owner, nbytes in protection.inbox_nbytes([self.extents.nbytes] * COMM.size).items():
            pool.inbox[owner][:] = [self.filled(nbytes) for _ in range(2)]
        protection.open_windows(pool)

        def protect() -> None:
            self.generation += 1
            attempt = Attempt(b"b" * 16, self.generation)

            def header(check: int) -> Header:
                return Header(attempt, 1, COMM.rank, COMM.size, COMM.rank, 0, 100, self.extents, check, 0, "n", text,
                              "parity", protection.group)  # fmt: skip

            protection.offer(pool, self.extents)
            source = Source(self.slot, self.extents, header)
            assert protection.protect(pool, source, attempt), "the redundancy did not arrive completely"
            pool.release(attempt, [self.slot], True)

        return protect, self.rebuild(pool, parse(text).losses) if parse(text).parity else None

    def rebuild(self, pool: SlotPool, losses: int) -> Callable[[], None]:
        """Return a function that rebuilds the slots of the first ``losses`` ranks, each on its own rank."""
        group, lost_ranks = tuple(range(COMM.size)), range(losses)
        stripes = Stripes((self.extents.blocks,) * COMM.size, losses)
        lost = {stripes.unit(rank, False, block) for rank in lost_ranks for block in range(self.extents.blocks)}
        lost |= {stripes.unit(rank, True, block) for rank in lost_ranks for block in range(stripes.parity_blocks)}
        known = ParityGroup(group, losses, tuple(None if rank in lost_ranks else (rank, 0) for rank in group))
        exchange = ParityExchange(self.world, self.extents.block_nbytes, COMM.size)

        def rebuild() -> None:
            held = next(slot for slot in pool.inbox[COMM.rank] if slot.use is Use.HOLDS)
            heads = {header.rank: (header, table) for header, table in read_heads(held) if header.rank in lost_ranks}
            repair = Repair(known, (self.extents,) * COMM.size, stripes.rebuild(lost) or [], heads, group, group)
            slots = {COMM.rank: self.arrived if COMM.rank in lost_ranks else self.slot}
            blocks = RepairedBlocks([repair], slots, {(known, COMM.rank): held})
            roles = roles_of(COMM.rank, repair.tasks, blocks.rank_of)
            assert all(self.world.drive(exchange.moves(roles, blocks))), "a rebuilt block has the wrong bytes"

        return rebuild


def write(bench: Bench, samples: Samples, slot_nbytes: int) -> None:
    """Write a row for each action. Its rate counts the bytes of all slots, or for a rebuild those of the lost slots."""
    xor = next(values for name, values in samples.items() if name == f"xor:{COMM.size}")
    over = {MEMCPY: samples[MEMCPY], EXCHANGE: samples[EXCHANGE], XOR: xor}
    nbytes = slot_nbytes * COMM.size
    for what, seconds in samples.items():
        if what.endswith(" CPU"):
            continue
        scheme, rebuilds = what.split(":")[0], what.endswith("rebuild")
        share = (1 if scheme == "xor" else 2) / COMM.size if rebuilds else 1.0
        rate = f"{share * nbytes / np.median(seconds) / 1e9:.2f} GB/s"
        if scheme in REDSET_RATE and not rebuilds:
            published = {REDSET: np.array(nbytes / REDSET_RATE[scheme])}
            also = [(EXCHANGE, EXCHANGES) if scheme == "xor" else (XOR, XORS)]
            bench.rows(row(what, seconds, {**over, **published}, scheme, also=also, note=rate))
        else:
            bench.rows(row(what, seconds, over, note=rate))


def main() -> None:
    out, memory, nbytes, repetitions, transport = sys.argv[1:]
    bench = Bench(COMM, Path(out), Path(memory), int(repetitions))
    slots = Slots(Path(memory), int(nbytes), transport)
    actions: dict[str, Callable[[], None]] = {
        MEMCPY: slots.memcpy, "XOR loop": slots.xor, EXCHANGE: slots.exchange,
        "MPI_Reduce_scatter, BXOR": slots.reduce_scatter, "MPI_Accumulate, BXOR": slots.accumulate,
    }  # fmt: skip
    for text in ("copy", f"xor:{COMM.size}", f"rs:{COMM.size - 2}+2"):
        protect, rebuild = slots.scheme(text)
        actions[text] = protect
        if rebuild is not None:
            actions[f"{text}, rebuild"] = rebuild
    bench.header(**{"Reed-Solomon by": erasure_codes.library().split(" (")[0]})
    write(bench, bench.repeat(actions), int(nbytes))


if __name__ == "__main__":
    main()
