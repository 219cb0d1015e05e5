"""What one rank of ``mlflash bench`` does: it takes a task as JSON, and prints what it measured as one line of JSON.

After that it waits. If it gets a line, it closes its Checkpointer and ends; otherwise it waits until it is killed.
"""

from __future__ import annotations

import collections
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import mlflash

from ..mpi.world import load_mpi
from .doctor_checks import version_of

RESULT = "mlflash-bench: "  # before the line of JSON
WARM_UP = 1  # further repetitions, which do not count
_PIECES = 16  # tensors of a state
_SMALL_NBYTES, _MESSAGE_NBYTES, _MESSAGES, _ROUND_TRIPS = 8, 4 << 20, 16, 200
_LOOK_S = 0.005

Samples = dict[str, list[float]]  # by name: seconds of each repetition


class State:
    """Arrays that follow from rank and step alone, and memory whose pages exist already, to copy them to."""

    def __init__(self, rank: int, nbytes: int):
        self.step, self._rank, self._count = 0, rank, max(1, nbytes // 8 // _PIECES)
        self.arrays = {f"array{number}": self._first(number) for number in range(_PIECES)}
        self.nbytes = sum(array.nbytes for array in self.arrays.values())
        self._target = np.ones((_PIECES, self._count), np.int64)

    def _first(self, number: int) -> np.ndarray:
        return np.random.default_rng((self._rank, number)).integers(1 << 62, size=self._count)

    def next(self) -> int:
        """Change every array, and return the number of the step."""
        for array in self.arrays.values():
            array += 1
        self.step += 1
        return self.step

    def forget(self) -> None:
        """Overwrite every array."""
        for array in self.arrays.values():
            array.fill(-1)

    def check(self, step: int | None) -> None:
        """Compare all bits with those of a step that was restored, and go on from there."""
        if step is None:
            sys.exit("nothing was restored")
        if not all(np.array_equal(self._first(n), array - step) for n, array in enumerate(self.arrays.values())):
            sys.exit(f"other bits were restored than those of step {step}")
        self.step = step

    def memcpy(self) -> None:
        """Copy all arrays, as the yardstick."""
        for target, array in zip(self._target, self.arrays.values(), strict=True):
            np.copyto(target, array)


def seconds_of(action: Callable[[], object]) -> float:
    """Return how long an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def saves(rank: int, nbytes: int, repetitions: int, settings: dict[str, Any]) -> None:
    """Time saves, and restores into the live arrays. Collective over the ranks."""
    state, samples = State(rank, nbytes), collections.defaultdict[str, list[float]](list)
    with mlflash.Checkpointer(**settings) as ckpt:
        ckpt.prepare(state.arrays)
        for _ in range(WARM_UP + repetitions):
            step = state.next()
            samples["memcpy"].append(seconds_of(state.memcpy))
            start = time.perf_counter()
            snapshot = ckpt.save(step, state.arrays)
            samples["stall"].append(time.perf_counter() - start)
            snapshot.wait()
            samples["commit"].append(time.perf_counter() - start)
        for _ in range(WARM_UP + repetitions):
            samples["memcpy before restore"].append(seconds_of(state.memcpy))
            state.forget()
            start = time.perf_counter()
            restored = ckpt.restore(state.arrays)
            samples["restore"].append(time.perf_counter() - start)
            state.check(restored)
        answer({name: values[WARM_UP:] for name, values in samples.items()}, mpi=ckpt.report()["mpi"])
        wait_for_end()


def relaunched(rank: int, nbytes: int, settings: dict[str, Any]) -> None:
    """Restore what an earlier launch has saved, and save again. Collective over the ranks."""
    state = State(rank, nbytes)
    memcpy_s = seconds_of(state.memcpy)
    state.forget()
    start = time.perf_counter()
    with mlflash.Checkpointer(**settings) as ckpt:
        connected_s = time.perf_counter() - start
        start = time.perf_counter()
        restored = ckpt.restore(state.arrays)
        restore_s = time.perf_counter() - start
        state.check(restored)
        ckpt.save(state.next(), state.arrays).wait()
        answer({"memcpy": [memcpy_s], "connect": [connected_s], "restore": [restore_s]})
        wait_for_end()


def kept(rank: int, nbytes: int, folder: str, settings: dict[str, Any]) -> None:
    """Save each step until this process is killed, and again after another one was: under `mlflash run --keep-alive`.

    The ranks log as those of `demo_train`. All have the same state, because a waiting process does not know its rank.
    """
    state = State(rank, nbytes)

    def train(ckpt: mlflash.Checkpointer, start: int) -> None:
        path = Path(folder, f"rank{os.environ['RANK']}.jsonl")

        def log(event: str, **facts: Any) -> None:
            with path.open("a") as file:
                file.write(json.dumps({"event": event, "time": time.time(), **facts}) + "\n")

        if start:
            state.check(start)
        log("start", pid=os.getpid(), step=start, memcpy=seconds_of(state.memcpy))
        while True:
            step = state.next()
            ckpt.save(step, state.arrays).wait()
            log("step", step=step)

    mlflash.keep_alive(train, state.arrays, **settings)


def gpu(rank: int, nbytes: int, repetitions: int, settings: dict[str, Any], device: str) -> None:
    """Time eager and lazy saves of a training on a GPU beside the GPU's own copy to pinned memory."""
    from .bench_training import Copies, Device, Training, Waits

    training = Training(Device(device), nbytes)
    waits, copies = Waits(training), Copies(training.device, training.tensors())
    training.lasting(4 * copies.to_host())  # a lazy copy has ended within a step of four times its length
    samples = collections.defaultdict[str, list[float]](list)
    with mlflash.Checkpointer(**settings) as ckpt:
        ckpt.prepare(training.state)
        for step in range(2 * (WARM_UP + repetitions)):
            name, until = [("eager", None), ("lazy", training.optimizer)][step % 2]
            samples[f"device to host before {name}"].append(copies.to_host())
            bits = training.kept()
            start = time.perf_counter()
            snapshot = ckpt.save(step, training.state, until=until)
            stall_s = time.perf_counter() - start
            training.step()
            training.device.sync()
            samples[f"{name} stall"].append(stall_s + waits.seconds())
            snapshot.wait()
            samples[f"{name} commit"].append(time.perf_counter() - start)
            training.forget()
            if ckpt.restore(training.state) != step or training.differing(bits):
                sys.exit(f"other bits were restored than those that the {name} save had copied")
        answer({name: values[WARM_UP:] for name, values in samples.items()}, nbytes=copies.nbytes)
        wait_for_end()
    waits.close()


def fabric(rank: int, repetitions: int, peer: int) -> None:
    """Time messages and Puts between rank 0 and a rank of another node, by the MPI of couriers. Collective."""
    mpi = load_mpi()

    comm = mpi.COMM_WORLD
    space = np.ones(_MESSAGE_NBYTES * _MESSAGES if rank in (0, peer) else 0, np.uint8)
    source, window = np.ones_like(space), mpi.Win.Create(space, 1, comm=comm)
    samples = collections.defaultdict[str, list[float]](list)
    for _ in range(WARM_UP + repetitions if rank in (0, peer) else 0):
        other, small = peer - rank, space[:_SMALL_NBYTES]
        messages = np.split(space, _MESSAGES)

        def round_trips() -> None:
            for _ in range(_ROUND_TRIPS):
                first, second = (comm.Send, comm.Recv) if rank == 0 else (comm.Recv, comm.Send)  # noqa: B023
                first(small, other)  # noqa: B023
                second(small, other)  # noqa: B023

        def send_all() -> None:
            start = comm.Isend if rank == 0 else comm.Irecv
            mpi.Request.Waitall([start(message, other) for message in messages])  # noqa: B023
            (comm.Recv if rank == 0 else comm.Send)(small, other)  # noqa: B023

        def put(nbytes: int, times: int) -> None:
            for number in range(times):
                at = number * nbytes
                window.Put([source[at : at + nbytes], mpi.BYTE], peer, [at, nbytes, mpi.BYTE])
                if nbytes == _SMALL_NBYTES:
                    window.Flush(peer)

        samples["memcpy"].append(seconds_of(lambda: np.copyto(space, source)))
        samples["Send/Recv latency"].append(seconds_of(round_trips) / _ROUND_TRIPS / 2)
        samples["Send/Recv"].append(seconds_of(send_all))
        if rank == 0:
            window.Lock(peer)
            samples["Put latency"].append(seconds_of(lambda: put(_SMALL_NBYTES, _ROUND_TRIPS)) / _ROUND_TRIPS)
            window.Unlock(peer)
            start = time.perf_counter()
            window.Lock(peer)
            put(_MESSAGE_NBYTES, _MESSAGES)
            window.Unlock(peer)
            samples["Put"].append(time.perf_counter() - start)
            comm.Send(small, peer)
        else:
            comm.Recv(small, 0)  # waits inside MPI, so that Puts make progress
    met = comm.Ibarrier()
    while not met.Test():  # without a loop that would take a core from the two
        time.sleep(_LOOK_S)
    window.Free()
    device = next((line.split(":", 1)[1].strip() for line in mpi.Get_library_version().splitlines()
                   if line.startswith("MPICH Device")), "")  # fmt: skip
    answer({name: values[WARM_UP:] for name, values in samples.items()}, library=version_of(mpi), device=device,
           nbytes=space.nbytes)  # fmt: skip


def answer(samples: Samples, **facts: Any) -> None:
    """Print what was measured."""
    print(RESULT + json.dumps({"samples": samples, **facts}), flush=True)


def wait_for_end() -> None:
    """Wait until `mlflash bench` wants this rank to end by itself."""
    if not sys.stdin.readline():
        os._exit(1)  # `mlflash bench` has ended, and other ranks may have been killed


def main() -> None:
    """Do the task of the first argument."""
    task = json.loads(sys.argv[1])
    tasks: dict[str, Callable[..., None]] = {each.__name__: each for each in (saves, relaunched, kept, gpu, fabric)}
    tasks[task.pop("task")](**task)


if __name__ == "__main__":
    main()
