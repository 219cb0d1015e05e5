"""Measures how long a relaunched job takes to restore its state, on the same nodes and after a node was wiped.

    python benchmarks/restore/run.py [--mib 256] [--repetitions 6] [--quick] [--json FILE]

Two ranks run on this machine under mpiexec, each on a node of its own. In each repetition they make a new
Checkpointer, as a relaunched job does.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from bench.aims import LOOP, MEMCPY, MILLISECOND
from bench.clock import Action, Bench
from bench.launch import Part
from bench.question import Question, parser_of
from bench.rows import Samples, row
from bench.states import Saver, State, Yardsticks, bytes_of, change, large_state

from mlflash import Checkpointer

SMALL_COUNT, SMALL_NBYTES = 3000, 4 << 10

Work = Callable[[Checkpointer], dict[str, float]]


def restores(bench: Bench, nbytes: int) -> None:
    """Time all ways to get a state back."""
    logging.getLogger("mlflash").setLevel("ERROR")  # it warns of a step that is restored again and again
    yardsticks = Yardsticks(bench.comm, bench.memory, nbytes)
    in_place(bench, yardsticks, nbytes, wipe=False)
    in_place(bench, yardsticks, nbytes, wipe=True)
    small(bench, yardsticks)
    views(bench, yardsticks, nbytes)
    yardsticks.free()


def relaunched(bench: Bench, yardsticks: Yardsticks, state: State, work: Work, wipe: bool = False) -> Samples:
    """Save a state once. Then time work with a new Checkpointer of the same job in each repetition.

    With ``wipe`` the second node loses its slots before each repetition.
    """
    with bench.job("restore") as job:
        with bench.checkpointer(job, redundancy="copy") as ckpt:
            Saver(ckpt, state)()

        def relaunch() -> dict[str, float]:
            if wipe and bench.comm.rank == 1:
                for file in bench.directory_of(job).glob("slot-*"):
                    file.unlink()
            bench.comm.Barrier()
            with bench.checkpointer(job, redundancy="copy") as ckpt:  # its exit waits until all copies are reprotected
                bench.comm.Barrier()
                start = time.perf_counter()
                more = work(ckpt)
                return {"work": time.perf_counter() - start, **more}

        actions: dict[str, Action] = {**yardsticks.of(bytes_of(state)), "relaunch": relaunch}
        return bench.repeat(actions, before=lambda: change(state))


def in_place(bench: Bench, yardsticks: Yardsticks, nbytes: int, wipe: bool) -> None:
    """Time restores into live tensors. The Checkpointer itself counts the times of the parts."""
    state = large_state(nbytes)

    def restore(ckpt: Checkpointer) -> dict[str, float]:
        assert ckpt.restore(state) == 1
        seconds = ckpt.report()["seconds"]
        return {"find": seconds["find and fetch"], "load": seconds["load"]}

    samples = relaunched(bench, yardsticks, state, restore, wipe)
    assert all(bool((value == i).all()) for i, value in enumerate(state.values())), "restored another state"
    over, where = {MEMCPY: samples[MEMCPY]}, "one node wiped" if wipe else "on the same node"
    bench.rows(
        row(f"restore, {where}", samples["work"], over, "" if wipe else "restore"),
        row(f"its part: find{', fetch' * wipe} and check every byte", samples["find"], over),
        row("its part: copy into live tensors", samples["load"], over),
    )


def small(bench: Bench, yardsticks: Yardsticks) -> None:
    """Time the restore of many small tensors, compared with a loop that copies each."""
    state = {f"bias{i}": torch.full((SMALL_NBYTES // 4,), float(i)) for i in range(SMALL_COUNT)}
    copies = {name: value.clone() for name, value in state.items()}

    def restore(ckpt: Checkpointer) -> dict[str, float]:
        start = time.perf_counter()
        for name, value in state.items():
            copies[name].copy_(value)
        loop_s = time.perf_counter() - start
        bench.comm.Barrier()
        start = time.perf_counter()
        assert ckpt.restore(state) == 1
        return {"loop": loop_s, "small": time.perf_counter() - start}

    samples = relaunched(bench, yardsticks, state, restore)
    assert all(bool((value == i).all()) for i, value in enumerate(state.values())), "restored another state"
    what = f"restore of {SMALL_COUNT:,} tensors of {SMALL_NBYTES >> 10} KiB"
    bench.rows(row(what, samples["small"], {LOOP: samples["loop"]}, "small restore"))


def views(bench: Bench, yardsticks: Yardsticks, nbytes: int) -> None:
    """Time `Checkpointer.load(copy=False)`, which gives unchecked views of what is in memory."""
    state = large_state(nbytes)

    def view(ckpt: Checkpointer) -> dict[str, float]:
        step, loaded = ckpt.load(copy=False)
        assert step == 1 and len(loaded) == len(state)
        return {"last": float(loaded["layer1"][-1])}

    samples = relaunched(bench, yardsticks, state, view)
    assert (samples["last"] == 1).all(), "the views show another state"
    over = {MEMCPY: samples[MEMCPY], MILLISECOND: np.array(1e-3)}
    bench.rows(row("load(copy=False): views, unchecked", samples["work"], over, "views"))


def main() -> int:
    parser = parser_of(__doc__, repetitions=6)
    parser.add_argument("--mib", type=int, default=256, help="MiB of tensors per rank, a multiple of 8")
    args = parser.parse_args()
    if args.quick:
        args.mib, args.repetitions = 32, 3
    return Question(args).run([Part(2, restores, {"nbytes": args.mib << 20})])


if __name__ == "__main__":
    sys.exit(main())
