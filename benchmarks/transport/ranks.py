"""The program of each of the two ranks of run.py: it times every way to send, memcpy, a raw Sendrecv and a raw Put.

The way runs in a second thread, like mlflash's courier, while the main thread waits or computes. During the yardsticks
the main thread always waits. If a way is not done within its deadline, this process ends, because MPI cannot be
interrupted.
"""

from __future__ import annotations

import argparse
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from bench.aims import MEMCPY, MEMCPY_AND_PUT
from bench.clock import WARM_UP, Bench, slowest
from bench.rows import Row, row
from computing import Computing
from exchange import Exchange, mapped
from leaving import leave
from mpi4py import MPI
from saves import SAVES, Saves
from ways import WAYS

SENDRECV, PUT, WHOLE = "Sendrecv", "Put", "whole"
MEMCPY_AND_SENDRECV = "memcpy + Sendrecv"


class Clock:
    """Times the ways and writes the results.

    Args:
        out: a file. Rank 0 appends lines of JSON to it.
        memory: a directory in memory.
        nbytes: bytes per rank and direction.
        chunk_nbytes: bytes per transfer.
        repetitions: number of repetitions. The median counts.
        main: the work of the main thread during an exchange, see `computing`.
        deadline_s: limit of one exchange in seconds.
    """

    def __init__(
        self, out: Path, memory: Path, nbytes: int, chunk_nbytes: int, repetitions: int, main: str, deadline_s: float
    ):
        self.comm = MPI.COMM_WORLD
        self._bench = Bench(self.comm, out, memory, repetitions, WARM_UP)
        self._bench.header()
        self._memory, self._nbytes, self._chunk_nbytes = memory, nbytes, chunk_nbytes
        self._repetitions, self._deadline_s = repetitions, deadline_s
        self._computing = Computing(main)
        self._source = np.random.default_rng(self.comm.rank).integers(0, 256, nbytes, dtype=np.uint8)
        self._target = np.ones_like(self._source)
        self._exposed = mapped(memory, nbytes)
        self._window = MPI.Win.Create(self._exposed, 1, comm=self.comm)

    def time(self, way: str) -> None:
        """Time one way and write its line."""
        timed = self._make(way)
        rounds = []
        for i in range(WARM_UP + self._repetitions):
            actions = {MEMCPY: self._memcpy, SENDRECV: self._sendrecv, PUT: self._put}
            seconds = {name: self._timed(action) for name, action in actions.items()}
            self.comm.Barrier()
            alone = self._computing.loops_per_s()
            timed.forget()
            self.comm.Barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            loops = self._in_second_thread(timed, way)
            seconds |= {WHOLE: time.perf_counter() - start, "CPU": time.process_time() - cpu_start}
            kept = loops / seconds[WHOLE] / alone if alone else 0.0
            rounds.append({**slowest(self.comm, seconds), "kept": self.comm.allreduce(kept) / self.comm.size})
            if i == 0 and rounds[0][WHOLE] > self._deadline_s / 2:
                break  # it is so slow that one exchange is enough
        timed.free()
        counted = rounds[WARM_UP:] or rounds
        taken = {name: np.array([one[name] for one in counted]) for name in rounds[0]}
        over = {MEMCPY: taken[MEMCPY], MEMCPY_AND_PUT: taken[MEMCPY] + taken[PUT],
                MEMCPY_AND_SENDRECV: taken[MEMCPY] + taken[SENDRECV]}  # fmt: skip
        notes = ["once"] * (len(counted) == 1)
        if taken["kept"].any():
            notes.append(f"the main thread keeps {np.median(taken['kept']):.2f} of its speed")
        cpu_s = float(np.median(taken["CPU"]))
        self._bench.rows(row(way, taken[WHOLE], over, cpu_seconds=cpu_s, note="; ".join(notes)))

    def _make(self, way: str) -> Exchange | Saves:
        if way in SAVES:
            return Saves(self.comm, self._memory, self._source, self._chunk_nbytes, SAVES[way])
        return Exchange(self.comm, self._memory, self._source, self._chunk_nbytes, way)

    def _in_second_thread(self, timed: Exchange | Saves, way: str) -> int:
        failed: list[BaseException] = []
        done = threading.Event()

        def courier() -> None:
            try:
                if isinstance(timed, Saves):
                    timed.wait()
                else:
                    WAYS[way](timed)
            except BaseException as error:
                failed.append(error)
            done.set()

        if isinstance(timed, Saves):
            timed.save()
        thread = threading.Thread(target=courier, name="courier", daemon=True)
        thread.start()
        loops = self._computing.until(done, self._deadline_s)
        if not done.is_set():
            came = f", {timed.arrived() >> 20} MiB arrived" if timed.arrived() >= 0 else ""
            note = f"never: not done after {self._deadline_s:g} s{came}"
            self._bench.rows(Row(what=way, note=note))
            leave()
        thread.join()
        if failed:
            raise failed[0]
        return loops

    def _timed(self, action: Any) -> float:
        self.comm.Barrier()
        start = time.perf_counter()
        action()
        return time.perf_counter() - start

    # Yardsticks: only the main thread, without checksums

    def _memcpy(self) -> None:
        np.copyto(self._target, self._source)

    def _sendrecv(self) -> None:
        peer = 1 - self.comm.rank
        for at in range(0, self._nbytes, self._chunk_nbytes):
            there = slice(at, at + self._chunk_nbytes)
            self.comm.Sendrecv([self._target[there], MPI.BYTE], peer, 0, [self._exposed[there], MPI.BYTE], peer, 0)

    def _put(self) -> None:
        peer = 1 - self.comm.rank
        self._window.Lock(peer)
        for at in range(0, self._nbytes, self._chunk_nbytes):
            raw = self._target[at : at + self._chunk_nbytes]
            self._window.Put([raw, MPI.BYTE], peer, [at, raw.nbytes, MPI.BYTE])
        self._window.Unlock(peer)

    def free(self) -> None:
        self._window.Free()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("memory", type=Path)
    parser.add_argument("nbytes", type=int)
    parser.add_argument("chunk_nbytes", type=int)
    parser.add_argument("repetitions", type=int)
    parser.add_argument("main")
    parser.add_argument("deadline_s", type=float)
    parser.add_argument("ways", help="ways to send, separated by |")
    arguments = vars(parser.parse_args())
    ways = arguments.pop("ways").split("|")
    clock = Clock(**arguments)
    for way in ways:
        clock.time(way)
    clock.free()


if __name__ == "__main__":
    main()
