"""The program of each of the two ranks: it times one library, memcpy and mlflash with one state.

A round runs all of them one after the other, on both ranks at once. The slowest rank counts. Ratios are made within a
round.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.aims import MEMCPY
from clocks import cpu_s
from interface import Peer, Place, State
from listed import BY_NAME, OURS
from memory import held, watching
from mpi4py import MPI

from mlflash.adapters.distributed import init_process_group

COMM = MPI.COMM_WORLD
UNTIMED = 2  # saves of each library after its first one and before those that are timed

Seconds = dict[str, float]


class Bench:
    """The state of this rank, a copy of it, and the measurements."""

    def __init__(self, out: Path, root: int, count: int, nbytes: int):
        bits = torch.Generator().manual_seed(COMM.rank)
        self.state: State = {f"layer{i}": torch.empty(nbytes // 4 // count) for i in range(count)}
        for value in self.state.values():
            value.view(torch.int32).random_(-(1 << 31), 1 << 31, generator=bits)  # any bits, including NaN
        self.kept = {name: value.clone() for name, value in self.state.items()}
        self.nbytes = sum(value.nbytes for value in self.state.values())
        self.out, self.root, self.step = out, root, 0

    def memcpy(self) -> None:
        for name, value in self.state.items():
            self.kept[name].copy_(value)

    def change(self) -> None:
        """Change every tensor, like a training step."""
        torch._foreach_add_([value.view(torch.int32) for value in self.state.values()], 1)

    def save(self, peer: Peer) -> Seconds:
        """Save the state and wait until the checkpoint is whole."""
        self.step += 1
        COMM.Barrier()
        cpu, start = cpu_s(), time.perf_counter()
        peer.save(self.step, self.state)
        stall = time.perf_counter() - start
        peer.wait()
        whole = time.perf_counter() - start
        COMM.Barrier()  # the work for the other rank counts too
        return {"stall": stall, "whole": whole, "CPU": cpu_s() - cpu}

    def restore(self, peer: Peer, what: str) -> Seconds:
        """Overwrite the state, load it into the same tensors, and compare all bits."""
        for value in self.state.values():
            value.view(torch.int32).fill_(-1)
        COMM.Barrier()
        start = time.perf_counter()
        loaded = peer.load(self.state)
        load = time.perf_counter() - start
        if loaded is not None:
            for name, value in self.state.items():
                value.copy_(loaded[name])
        restore = time.perf_counter() - start
        COMM.Barrier()
        wrong = sum(
            not torch.equal(value.view(torch.int32), self.kept[name].view(torch.int32))
            for name, value in self.state.items()
        )
        if wrong:
            raise RuntimeError(f"{what}: {wrong} of {len(self.state)} tensors of rank {COMM.rank} have wrong bits")
        return {"load": load, "restore": restore}

    def opened(self, name: str, place: Place) -> Peer:
        """Open a library and make first saves. Write times and memory. Check that later changes are not in them."""
        before = self.level()
        start = time.perf_counter()
        peer: Peer = importlib.import_module(BY_NAME[name].module).Library(place, self.state)
        opened_s = time.perf_counter() - start
        COMM.Barrier()
        self.memcpy()
        first = slowest(lambda: self.save(peer))
        self.restore(peer, f"{name}, first save")
        most: list[int] = []
        for _ in range(UNTIMED):
            self.change()
            self.memcpy()
            peer.tidy()
            with self.peak(most):
                self.step += 1
                peer.save(self.step, self.state)
                self.change()  # at once: the checkpoint must not contain this change
                peer.wait()
        COMM.Barrier()
        peer.tidy()
        rest = self.level()
        loads: list[int] = []
        with self.peak(loads):
            self.restore(peer, f"{name}, changed as soon as save returned")
        sizes = {"at rest": rest, "save": max(most, default=0), "restore": max(loads, default=0)}
        ratios = {key: (value - before) / (COMM.size * self.nbytes) for key, value in sizes.items()}
        self.say({"who": name, "first": {**first, "open": opened_s}, "memory": ratios})
        return peer

    def rounds(self, peers: dict[str, Peer], rounds: int) -> None:
        """Time all saves, one after the other as in a training, and then all restores. Write all samples."""
        samples: dict[str, list[Seconds]] = {who: [] for who in (MEMCPY, *peers)}
        for _ in range(rounds):
            self.change()
            samples[MEMCPY].append(slowest(self.time_memcpy))
            for who, peer in peers.items():
                samples[who].append(slowest(lambda: self.save(peer)))  # noqa: B023
                peer.tidy()
        for i in range(rounds):  # of the last save: all libraries saved the same state
            again = slowest(self.time_memcpy)
            samples[MEMCPY][i]["memcpy, restoring"] = again[MEMCPY]
            for who, peer in peers.items():
                samples[who][i] |= slowest(lambda: self.restore(peer, who))  # noqa: B023
        for who, all in samples.items():
            self.say({"who": who, "samples": {key: [one[key] for one in all] for key in all[0]}})

    def time_memcpy(self) -> Seconds:
        cpu, start = cpu_s(), time.perf_counter()
        self.memcpy()
        return {MEMCPY: time.perf_counter() - start, "CPU": cpu_s() - cpu}

    def level(self) -> int:
        COMM.Barrier()
        level: int = COMM.bcast(held(self.root) if COMM.rank == 0 else 0)
        return level

    @contextlib.contextmanager
    def peak(self, most: list[int]) -> Any:
        """Let rank 0 watch the memory of both ranks."""
        with watching(self.root, most) if COMM.rank == 0 else contextlib.nullcontext():
            COMM.Barrier()
            yield
            COMM.Barrier()

    def say(self, line: dict[str, Any]) -> None:
        if COMM.rank == 0:
            with self.out.open("a") as file:
                file.write(json.dumps(line) + "\n")


def slowest(action: Callable[[], Seconds]) -> Seconds:
    """Run an action on all ranks at once. Return the maximum of each number, but the mean of the CPU seconds."""
    COMM.Barrier()
    mine = action()
    most, total = np.empty(len(mine)), np.empty(len(mine))
    numbers = np.array(list(mine.values()))
    COMM.Allreduce(numbers, most, MPI.MAX)
    COMM.Allreduce(numbers, total, MPI.SUM)
    return {key: float(total[i] / COMM.size if key == "CPU" else most[i]) for i, key in enumerate(mine)}


def main() -> None:
    out, memory, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    root, count, nbytes, rounds = map(int, sys.argv[4:])
    bench = Bench(out, root, count, nbytes)
    vendor, version = MPI.get_vendor()
    bench.say({"mpi": f"{vendor} {'.'.join(map(str, version))}"})
    init_process_group(comm=COMM)
    place = Place(COMM, memory)
    peers = {one.name: bench.opened(one.name, place) for one in OURS}
    warnings.resetwarnings()  # the later ones come from the other library, and must not be errors
    warnings.simplefilter("ignore")
    os.environ["PYTHONWARNINGS"] = "ignore"
    peers[name] = bench.opened(name, place)
    bench.rounds(peers, rounds)
    for peer in peers.values():
        peer.close()
    COMM.Barrier()
    torch.distributed.destroy_process_group()
