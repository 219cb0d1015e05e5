"""What each of the two ranks of save_restore.py does: every case, timed beside a memcpy and a raw MPI Put.

A repetition runs its actions one after the other, all ranks at once; the slowest rank counts. Ratios are made
within a repetition and their median is taken, so that a load that comes and goes hits both sides alike.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from mpi4py import MPI

from mlflash import Checkpointer

MIB = 1 << 20
LARGE_NBYTES = 8 * MIB  # per tensor
SMALL_COUNT, SMALL_NBYTES = 3000, 4096
PUT_NBYTES = 4 * MIB
WARM_UP = 2

MEMCPY, MEMCPY_AND_PUT = "memcpy", "memcpy + Put"
STALL = (MEMCPY, 1.1)  # the aims of the design: over what, and at most how much
COMMITTED = (MEMCPY_AND_PUT, 1.6)
CPU = (MEMCPY, 2.0)  # CPU seconds on both sides
SMALL_STALL = ("a loop of copy_", 1.2)
FIRST = ("a warm save", 1.3)
RESTORE = (MEMCPY, 2.0)
SHARED = ("no redundancy", 1.5)

Action = Callable[[], Mapping[str, float] | None]
Pieces = Sequence[np.ndarray]  # of bytes
Samples = dict[str, np.ndarray]


class Bench:
    """Both ranks' clock, and the two things that all is measured by."""

    def __init__(self, comm: MPI.Comm, memory: Path, nbytes: int, repetitions: int, out: Path):
        self.comm, self.memory, self.nbytes, self.repetitions, self.out = comm, memory, nbytes, repetitions, out
        most = max(nbytes, SMALL_COUNT * SMALL_NBYTES)
        self._target = np.full(most, 1, dtype=np.uint8)
        with tempfile.TemporaryFile(dir=memory) as file:
            os.posix_fallocate(file.fileno(), 0, most)
            exposed = np.frombuffer(mmap.mmap(file.fileno(), most), dtype=np.uint8)
        exposed[:] = 0
        self._window = MPI.Win.Create(exposed, 1, comm=comm)

    def free(self) -> None:
        self._window.Free()

    def memcpy(self, pieces: Pieces) -> None:
        """Copy arrays into warm memory, one after the other."""
        at = 0
        for piece in pieces:
            np.copyto(self._target[at : at + piece.nbytes], piece)
            at += piece.nbytes

    def put(self, nbytes: int) -> None:
        """Put into the other rank's file in /dev/shm, while it does the same to ours."""
        peer = 1 - self.comm.rank
        self._window.Lock(peer)
        for at in range(0, nbytes, PUT_NBYTES):
            length = min(PUT_NBYTES, nbytes - at)
            self._window.Put([self._target[at : at + length], MPI.BYTE], peer, [at, length, MPI.BYTE])
        self._window.Unlock(peer)

    def repeat(self, pieces: Pieces, actions: Mapping[str, Action], before: Action = lambda: None) -> Samples:
        """Time memcpy, Put and the actions, in this order, again and again.

        Args:
            pieces: what memcpy copies, one after the other; Put moves as many bytes.
            actions: what to time, by name; may return more seconds by name.
            before: what comes before each repetition, not timed.

        Returns:
            Seconds of the slowest rank by name, shape ``(repetitions,)``, and CPU seconds by name + " CPU".
        """
        nbytes = sum(piece.nbytes for piece in pieces)
        todo = {MEMCPY: lambda: self.memcpy(pieces), "Put": lambda: self.put(nbytes), **actions}
        rounds = []
        for _ in range(WARM_UP + self.repetitions):
            before()
            seconds: dict[str, float] = {}
            for name, action in todo.items():
                self.comm.Barrier()
                start, cpu_start = time.perf_counter(), time.process_time()
                more = action()
                seconds[name] = time.perf_counter() - start
                seconds[f"{name} CPU"] = time.process_time() - cpu_start
                seconds.update(more or {})
            rounds.append(self.comm.allreduce(np.array(list(seconds.values())), _SLOWEST))
        return dict(zip(seconds, np.array(rounds[WARM_UP:]).T, strict=True))

    def row(self, what: str, samples: Samples, name: str, aim: tuple[str, float] | None = None,
            over: np.ndarray | None = None) -> None:  # fmt: skip
        """Write the table's row of what was timed under ``name``.

        Args:
            what: the row's title.
            samples: from `repeat`.
            name: in ``samples``.
            aim: ratio over what, and at most how much.
            over: seconds ``(repetitions,)`` that the aim is over, where it is not memcpy (and Put).
        """
        seconds = samples[name]
        ratios = {MEMCPY: seconds / samples[MEMCPY], MEMCPY_AND_PUT: seconds / (samples[MEMCPY] + samples["Put"])}
        if aim is not None and over is not None:
            ratios[aim[0]] = seconds / over
        if self.comm.rank == 0:
            row = {"what": what, "seconds": float(np.median(seconds)), "aim": aim, "samples": seconds.tolist(),
                   "over": {of: float(np.median(values)) for of, values in ratios.items()}}  # fmt: skip
            with self.out.open("a") as file:
                file.write(json.dumps(row) + "\n")

    @contextlib.contextmanager
    def job(self, name: str) -> Iterator[str]:
        """Give a job name of its own; at the end remove what the job left in memory."""
        yield name
        self.comm.Barrier()
        if self.comm.rank == 0:
            shutil.rmtree(self.memory / f"mlflash-{os.getuid()}" / name)
        self.comm.Barrier()

    def checkpointer(self, job: str, **settings: Any) -> Checkpointer:
        return Checkpointer(memory=str(self.memory), job=job, comm=self.comm, strict=True, timeout_s=60, **settings)


def _slowest(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.maximum(a, b)


_SLOWEST: Any = _slowest  # allreduce of a Python object takes a function as its operation


def large_state(nbytes: int) -> dict[str, torch.Tensor]:
    return {f"layer{i}": torch.full((LARGE_NBYTES // 4,), float(i)) for i in range(nbytes // LARGE_NBYTES)}


def bytes_of(state: dict[str, torch.Tensor]) -> Pieces:
    return [tensor.view(torch.uint8).numpy() for tensor in state.values()]


def change(state: dict[str, torch.Tensor]) -> None:
    """Do what a training step does to a state: every tensor of it is new."""
    torch._foreach_add_(list(state.values()), 1.0)


class Saver:
    """Saves a state of growing steps; an action for `Bench.repeat`."""

    def __init__(self, ckpt: Checkpointer, state: dict[str, torch.Tensor]):
        self._ckpt, self._state, self._step = ckpt, state, 0

    def __call__(self) -> dict[str, float]:
        self._step += 1
        start = time.perf_counter()
        snapshot = self._ckpt.save(self._step, self._state)
        stall_s = time.perf_counter() - start
        snapshot.wait()
        return {"stall": stall_s}


def save_large(bench: Bench, redundancy: str, transport: str) -> None:
    state = large_state(bench.nbytes)
    title = redundancy if redundancy == "none" else f"{redundancy}, {transport}"
    with (
        bench.job(f"{redundancy}-{transport}") as job,
        bench.checkpointer(job, redundancy=redundancy, transport=transport) as ckpt,
    ):
        ckpt.prepare(state)
        samples = bench.repeat(bytes_of(state), {"save": Saver(ckpt, state)}, before=lambda: change(state))
    bench.row(f"stall, {title}", samples, "stall", STALL)
    bench.row(f"committed, {title}", samples, "save", None if redundancy == "none" else COMMITTED)
    cpu = {name.removesuffix(" CPU"): seconds for name, seconds in samples.items() if name.endswith(" CPU")}
    bench.row(f"CPU seconds, {title}", cpu, "save", CPU if redundancy == "none" else None)


def save_shared(bench: Bench) -> None:
    """What both ranks hold alike, as under DDP: protected by being there, beside the same save with no redundancy."""
    state = large_state(bench.nbytes)
    with (
        bench.job("alone") as alone,
        bench.job("shared") as shared,
        bench.checkpointer(alone, redundancy="none") as bare,
        bench.checkpointer(shared, redundancy="copy", replicated=True) as ckpt,
    ):
        bare.prepare(state)
        ckpt.prepare(state)
        actions = {"bare": Saver(bare, state), "save": Saver(ckpt, state)}
        samples = bench.repeat(bytes_of(state), actions, before=lambda: change(state))
        held = [sum(slot["nbytes"] for slot in one.report()["slots"]) / 2 / bench.nbytes for one in (bare, ckpt)]
        assert max(held) < 1.01, "more than one state in each of two slots"
    bench.row("stall, copy, shared by all", samples, "stall", STALL)
    bench.row("committed, copy, shared by all", samples, "save", SHARED, over=samples["bare"])
    cpu = {name.removesuffix(" CPU"): seconds for name, seconds in samples.items() if name.endswith(" CPU")}
    bench.row("CPU seconds, copy, shared by all", cpu, "save")


def save_small(bench: Bench) -> None:
    state = {f"bias{i}": torch.full((SMALL_NBYTES // 4,), float(i)) for i in range(SMALL_COUNT)}
    copies = {name: value.clone() for name, value in state.items()}

    def loop() -> None:
        for name, value in state.items():
            copies[name].copy_(value)

    with bench.job("small") as job, bench.checkpointer(job, redundancy="copy") as ckpt:
        ckpt.prepare(state)
        actions = {"loop": loop, "save": Saver(ckpt, state)}
        one_piece = np.concatenate(bytes_of(state))
        samples = bench.repeat([one_piece], actions, before=lambda: change(state))
    bench.row(f"a loop of copy_, {SMALL_COUNT} x 4 KiB", samples, "loop")
    bench.row(f"stall, {SMALL_COUNT} x 4 KiB", samples, "stall", SMALL_STALL, over=samples["loop"])
    bench.row(f"committed, {SMALL_COUNT} x 4 KiB", samples, "save")


def save_first(bench: Bench) -> None:
    """Time the first save of a job against its fourth; prepared or not, at once or a while before."""
    state = large_state(bench.nbytes)

    def saves(prepare: bool, pause_s: float) -> None:
        timed = {"first": lambda: first(prepare, pause_s)}
        samples = bench.repeat(bytes_of(state), timed, before=lambda: change(state))
        when = "unprepared" if not prepare else "just prepared" if pause_s == 0 else "prepared"
        bench.row(f"first save, {when}: stall", samples, "first stall", FIRST, over=samples["warm stall"])
        bench.row(f"first save, {when}: committed", samples, "first committed", FIRST, over=samples["warm committed"])

    def first(prepare: bool, pause_s: float) -> dict[str, float]:
        with bench.job("first") as job, bench.checkpointer(job, redundancy="copy") as ckpt:
            if prepare:
                ckpt.prepare(state)
                time.sleep(pause_s)
            saver, seconds = Saver(ckpt, state), []
            for _ in range(4):
                bench.comm.Barrier()
                start = time.perf_counter()
                seconds.append({**saver(), "committed": time.perf_counter() - start})
        return {f"{name} {key}": s[key] for name, s in (("first", seconds[0]), ("warm", seconds[-1])) for key in s}

    saves(prepare=False, pause_s=0)
    saves(prepare=True, pause_s=0)
    saves(prepare=True, pause_s=8 * bench.nbytes / 1e9)  # both ranks' eight slots, at 1 GB/s


def restore(bench: Bench, wipe: bool) -> None:
    """Restore in a relaunched job, with all slots where they were, or with those of the second node gone."""
    state = large_state(bench.nbytes)
    with bench.job("restore") as job:
        with bench.checkpointer(job, redundancy="copy") as ckpt:
            Saver(ckpt, state)()

        def relaunch() -> dict[str, float]:
            if wipe and bench.comm.rank == 1:
                for file in (bench.memory / f"mlflash-{os.getuid()}" / job / "node1").glob("slot-*"):
                    file.unlink()
            bench.comm.Barrier()
            with bench.checkpointer(job, redundancy="copy") as ckpt:  # its end waits until all is healed
                bench.comm.Barrier()
                start = time.perf_counter()
                assert ckpt.restore(state) == 1
                return {"restore": time.perf_counter() - start}

        samples = bench.repeat(bytes_of(state), {"relaunch": relaunch}, before=lambda: change(state))
    assert all(bool((value == i).all()) for i, value in enumerate(state.values())), "restored something else"
    if wipe:
        bench.row("restore, one node wiped", samples, "restore")
    else:
        bench.row("restore on the same node", samples, "restore", RESTORE)


def peer_dcp(bench: Bench) -> None:
    """PyTorch's DCP, each rank for itself, into /dev/shm: no copy elsewhere, no checksum of the content."""
    state = large_state(bench.nbytes)
    path = bench.memory / f"dcp-{bench.comm.rank}"

    def save() -> None:
        dcp.save(state, checkpoint_id=path, no_dist=True)

    def load() -> None:
        dcp.load(state, checkpoint_id=path, no_dist=True)

    def forget() -> None:
        shutil.rmtree(path, ignore_errors=True)
        change(state)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)  # said even with no_dist=True
        samples = bench.repeat(bytes_of(state), {"save": save, "load": load}, before=forget)
    shutil.rmtree(path)
    bench.row("peer: torch DCP save to /dev/shm", samples, "save")
    bench.row("peer: torch DCP load", samples, "load")


def yardsticks(bench: Bench) -> None:
    pieces = bytes_of(large_state(bench.nbytes))
    whole = np.concatenate(pieces)
    samples = bench.repeat(pieces, {"whole": lambda: bench.memcpy([whole])})
    bench.row("memcpy, tensor by tensor", samples, MEMCPY)
    bench.row("memcpy in one piece", samples, "whole")  # glibc goes past the caches above about 20 MiB: faster
    bench.row("raw MPI Put", samples, "Put")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("memory", type=Path)
    parser.add_argument("nbytes", type=int)
    parser.add_argument("repetitions", type=int)
    bench = Bench(MPI.COMM_WORLD, **vars(parser.parse_args()))
    if bench.comm.rank == 0:
        name, version = MPI.get_vendor()
        bench.out.write_text(json.dumps({"mpi": f"{name} {'.'.join(map(str, version))}"}) + "\n")
    yardsticks(bench)
    save_large(bench, "copy", "p2p")
    save_large(bench, "copy", "rma")
    save_large(bench, "none", "auto")
    save_shared(bench)
    save_small(bench)
    save_first(bench)
    restore(bench, wipe=False)
    restore(bench, wipe=True)
    peer_dcp(bench)
    bench.free()


if __name__ == "__main__":
    main()
