"""Times one library, memcpy and mlflash with one state on the two ranks.

A round runs all of them one after the other, on both ranks at once. The slowest rank counts. Ratios are made within a
round.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from bench.aims import MEMCPY
from bench.clock import Bench
from interface import Peer, Place, State
from listed import BY_NAME, OURS
from mpi4py import MPI
from processes import cpu_s, held, watching

from mlflash.adapters.distributed import init_process_group

COMM = MPI.COMM_WORLD
UNTIMED = 2  # saves of each library after its first one and before those that are timed

Seconds = dict[str, float]


class Rounds:
    """The state of this rank, a copy of it, and the measurements.

    Args:
        bench: takes the results.
        root: the process that started the ranks.
        count: number of tensors.
        nbytes: size of all tensors together.
    """

    def __init__(self, bench: Bench, root: int, count: int, nbytes: int):
        bits = torch.Generator().manual_seed(COMM.rank)
        self.state: State = {f"layer{i}": torch.empty(nbytes // 4 // count) for i in range(count)}
        for value in self.state.values():
            value.view(torch.int32).random_(-(1 << 31), 1 << 31, generator=bits)  # any bits, including NaN
        self.kept = {name: value.clone() for name, value in self.state.items()}
        self.nbytes = sum(value.nbytes for value in self.state.values())
        self.bench, self.root, self.step = bench, root, 0

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
        module, _, library = BY_NAME[name].implementation.partition(".")
        peer: Peer = getattr(importlib.import_module(module), library)(place, self.state)
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
        self.bench.write({"who": name, "first": {**first, "open": opened_s}, "memory": ratios})
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
        for who, rounds_of in samples.items():
            self.bench.write(
                {"who": who, "samples": {key: [seconds[key] for seconds in rounds_of] for key in rounds_of[0]}}
            )

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


def slowest(action: Callable[[], Seconds]) -> Seconds:
    """Run an action on all ranks at once. Return the maximum of each number, but the mean of the CPU seconds."""
    COMM.Barrier()
    mine = action()
    most, total = np.empty(len(mine)), np.empty(len(mine))
    numbers = np.array(list(mine.values()))
    COMM.Allreduce(numbers, most, MPI.MAX)
    COMM.Allreduce(numbers, total, MPI.SUM)
    return {key: float(total[i] / COMM.size if key == "CPU" else most[i]) for i, key in enumerate(mine)}


def compare(bench: Bench, name: str, root: int, count: int, nbytes: int) -> None:
    """Time one library beside mlflash."""
    rounds = Rounds(bench, root, count, nbytes)
    init_process_group(comm=COMM)
    place = Place(COMM, bench.memory)
    peers = {library.name: rounds.opened(library.name, place) for library in OURS}
    warnings.resetwarnings()  # the later ones come from the other library, and must not be errors
    warnings.simplefilter("ignore")
    os.environ["PYTHONWARNINGS"] = "ignore"
    peers[name] = rounds.opened(name, place)
    rounds.rounds(peers, bench.repetitions)
    for peer in peers.values():
        peer.close()
    COMM.Barrier()
    torch.distributed.destroy_process_group()
