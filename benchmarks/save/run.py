"""Measures how long a save stops training, when it is committed, and how many CPU seconds it takes.

    python benchmarks/save/run.py [--mib 256] [--repetitions 5] [--quick] [--json FILE]

Two ranks run on this machine under mpiexec, each on a node of its own. Then a training saves with
`until=optimizer`: first one rank, which leaves a core for copies during training, then two ranks.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from bench.aims import MEMCPY
from bench.clock import Action, Bench, cpu
from bench.launch import Part
from bench.question import Question, parser_of
from bench.rows import row
from bench.states import Saver, Yardsticks, both, bytes_of, change, large_state
from mpi4py import MPI

from mlflash import Checkpointer
from mlflash.tools.bench_training import Device, Training, Waits

COPIES = 4.0  # a step takes at least this many times as long as the copy


def saves(bench: Bench, nbytes: int) -> None:
    """Time all kinds of saves."""
    yardsticks = Yardsticks(bench.comm, bench.memory, nbytes)
    for redundancy in ("none", "copy"):
        save(bench, yardsticks, nbytes, redundancy)
    save_shared(bench, yardsticks, nbytes)
    yardsticks.free()


def save(bench: Bench, yardsticks: Yardsticks, nbytes: int, redundancy: str) -> None:
    state = large_state(nbytes)
    with bench.job(redundancy) as job, bench.checkpointer(job, redundancy=redundancy) as ckpt:
        ckpt.prepare(state)
        actions: dict[str, Action] = {**yardsticks.of(bytes_of(state)), "save": Saver(ckpt, state)}
        samples = bench.repeat(actions, before=lambda: change(state))
    over = {MEMCPY: samples[MEMCPY]}
    if redundancy == "none":
        bench.rows(row(MEMCPY, samples[MEMCPY], {}), row("raw MPI Put", samples["Put"], over))
    cpu_seconds = cpu(samples)
    bench.rows(
        row(f"stall, {redundancy}", samples["stall"], over, "stall"),
        row(f"committed, {redundancy}", samples["save"], both(samples), "committed" if redundancy == "copy" else ""),
        row(f"CPU seconds, {redundancy}", cpu_seconds["save"], {MEMCPY: cpu_seconds[MEMCPY]},
            "cpu" if redundancy == "none" else "cpu copy"),
    )  # fmt: skip


def save_shared(bench: Bench, yardsticks: Yardsticks, nbytes: int) -> None:
    """Save the same tensors on both ranks, as under DDP."""
    state = large_state(nbytes)
    with bench.job("shared") as job, bench.checkpointer(job, redundancy="copy", replicated=True) as ckpt:
        ckpt.prepare(state)
        actions: dict[str, Action] = {**yardsticks.of(bytes_of(state)), "save": Saver(ckpt, state)}
        samples = bench.repeat(actions, before=lambda: change(state))
        held = sum(slot["nbytes"] for slot in ckpt.report()["slots"]) / 2 / nbytes
        assert held < 1.01, "more than one state in each of two slots"
    bench.rows(
        row("stall, copy, shared by all", samples["stall"], {MEMCPY: samples[MEMCPY]}, "stall"),
        row("committed, copy, shared by all", samples["save"], both(samples)),
    )


def lazy(bench: Bench, nbytes: int) -> None:
    """Time saves that copy during the next step. A step takes about four times as long as the copy."""
    torch.set_num_threads(1)
    training = Training(Device("cpu"), nbytes)
    waits = Waits(training)
    pieces = [tensor.reshape(-1).view(torch.uint8).numpy() for tensor in training.tensors()]
    yardsticks = Yardsticks(bench.comm, bench.memory, sum(piece.nbytes for piece in pieces))
    memcpy: dict[str, Action] = {MEMCPY: lambda: yardsticks.memcpy(pieces)}
    training.lasting(COPIES * float(np.median(bench.repeat(memcpy)[MEMCPY])))
    training.resize(bench.comm.allreduce(len(training.batch), MPI.MAX))
    redundancy = "none" if bench.comm.size == 1 else "copy"
    with bench.job("lazy") as job, bench.checkpointer(job, redundancy=redundancy) as ckpt:
        ckpt.prepare(training.state)
        samples = bench.repeat({
            **memcpy, "eager": step_with(training, waits, ckpt, "eager", None),
            "lazy": step_with(training, waits, ckpt, "lazy", training.optimizer),
        })  # fmt: skip
    waits.close()
    yardsticks.free()
    for name, shows in (("eager", ""), ("lazy", "lazy")):
        bench.rows(row(f"{name} stall in a training, {redundancy}", samples[f"{name} stall"],
                       {MEMCPY: samples[MEMCPY]}, shows))  # fmt: skip


def step_with(training: Training, waits: Waits, ckpt: Checkpointer, name: str, until: Any) -> Action:
    """Return an action that saves and trains one step, and then waits for the commit."""

    def action() -> dict[str, float]:
        start = time.perf_counter()
        snapshot = ckpt.save((ckpt.last_step or 0) + 1, training.state, until=until)
        stall_s = time.perf_counter() - start
        training.step()
        snapshot.wait()
        return {f"{name} stall": stall_s + waits.seconds()}

    return action


def main() -> int:
    parser = parser_of(__doc__, repetitions=5)
    parser.add_argument("--mib", type=int, default=256, help="MiB of tensors per rank, a multiple of 8")
    args = parser.parse_args()
    if args.quick:
        args.mib, args.repetitions = 32, 3
    size = {"nbytes": args.mib << 20}
    return Question(args).run([Part(2, saves, size), Part(1, lazy, size), Part(2, lazy, size)])


if __name__ == "__main__":
    sys.exit(main())
