"""The program of each of two ranks: it times saves of states of difficult sizes, and the first saves of jobs."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from bench.aims import LOOP, WARM
from bench.clock import Action, Bench
from bench.rows import row
from bench.states import LARGE_NBYTES, Saver, State, bytes_of, change, large_state
from bench.yardsticks import Yardsticks, both
from mpi4py import MPI

SMALL_COUNT, SMALL_NBYTES = 3000, 4096
GROWS_EVERY, GROWTHS = 3, 3
GROWN, NEXT, SAME = "grown", "the next", "the third"  # the three saves from one growth to the next


def small(bench: Bench, beside: Yardsticks) -> None:
    state = {f"bias{i}": torch.full((SMALL_NBYTES // 4,), float(i)) for i in range(SMALL_COUNT)}
    copies = {name: value.clone() for name, value in state.items()}

    def loop() -> None:
        for name, value in state.items():
            copies[name].copy_(value)

    with bench.job("small") as job, bench.checkpointer(job, redundancy="copy") as ckpt:
        ckpt.prepare(state)
        in_one_piece = np.concatenate(bytes_of(state))
        actions: dict[str, Action] = {**beside.of([in_one_piece]), "loop": loop, "save": Saver(ckpt, state)}
        samples = bench.repeat(actions, before=lambda: change(state))
    over = {**both(samples), LOOP: samples["loop"]}
    case = f"{SMALL_COUNT} tensors of {SMALL_NBYTES >> 10} KiB"
    bench.rows(
        row("a loop of copy_", samples["loop"], over, case=case),
        row("stall", samples["stall"], over, "small", case=case),
        row("committed", samples["save"], over, case=case),
    )


def models(bench: Bench, beside: Yardsticks, nbytes: int) -> None:
    """Save states like those of a 7B model and of a mixture of experts, with fewer elements in each tensor."""
    matrices_and_norms = [*(32 * [1.0, 1e-4]), 3.0, 3.0, 1e-4]  # relative sizes: layers, then embeddings
    for which, sizes, over_what in (
        ("7B", matrices_and_norms, "stall"),
        ("a mixture of experts", 3333 * [1.0], "small"),
    ):
        state = weights_and_moments(sizes, nbytes)
        copies = {name: value.clone() for name, value in state.items()}

        def loop(state: State = state, copies: State = copies) -> None:
            for name, value in state.items():
                copies[name].copy_(value)

        with bench.job("models") as job, bench.checkpointer(job, redundancy="copy") as ckpt:
            ckpt.prepare(state)
            raw = [value.view(torch.uint8).reshape(-1).numpy() for value in state.values()]
            of_bytes = raw if over_what == "stall" else [np.concatenate(raw)]
            actions: dict[str, Action] = {**beside.of(of_bytes), "loop": loop, "save": Saver(ckpt, state)}
            samples = bench.repeat(actions)
        over = {**both(samples), LOOP: samples["loop"]}
        case = f"{len(state):,} tensors in mixed precision, as of {which}: {nbytes >> 20} MiB"
        bench.rows(
            row("a loop of copy_", samples["loop"], over, case=case),
            row("stall", samples["stall"], over, over_what, case=case),
            row("committed", samples["save"], over, case=case),
        )


def weights_and_moments(sizes: Sequence[float], nbytes: int) -> State:
    """Make weights of these relative sizes in half precision, and two moments of each in single precision."""
    state: State = {}
    for number, size in enumerate(sizes):
        count = max(1, int(nbytes / 10 * size / sum(sizes)))
        state[f"weight{number}"] = torch.ones(count, dtype=torch.bfloat16)
        state |= {f"{name}{number}": torch.full((count,), float(number)) for name in ("exp_avg", "exp_avg_sq")}
    return state


def huge(bench: Bench, beside: Yardsticks, nbytes: int) -> None:
    state = {"embedding": torch.zeros(nbytes // 4)}
    with bench.job("huge") as job, bench.checkpointer(job, redundancy="copy") as ckpt:
        ckpt.prepare(state)
        actions: dict[str, Action] = {**beside.of(bytes_of(state)), "save": Saver(ckpt, state)}
        samples = bench.repeat(actions, before=lambda: change(state))
    case = f"One tensor of {nbytes >> 20} MiB"
    bench.rows(
        row("stall", samples["stall"], both(samples), "stall", case=case),
        row("committed", samples["save"], both(samples), "committed", case=case),
    )


def growing(bench: Bench, beside: Yardsticks, nbytes: int) -> None:
    """Time a job whose state grows at every third save, like that of an optimizer in its first steps, or a cache."""
    begins = nbytes // LARGE_NBYTES // 2
    by = max(1, begins // GROWTHS - 1)
    whole = large_state((begins + GROWTHS * by) * LARGE_NBYTES)

    def job() -> dict[str, float]:
        found: dict[str, list[float]] = {}
        with bench.job("growing") as name, bench.checkpointer(name, redundancy="copy") as ckpt:
            state = dict(list(whole.items())[:begins])
            ckpt.prepare(state)
            saver = Saver(ckpt, state)
            for number in range(GROWS_EVERY * (1 + GROWTHS)):
                change(state)
                if number % GROWS_EVERY == 0 and number:
                    state |= dict(list(whole.items())[len(state) : len(state) + by])
                bench.comm.Barrier()
                start = time.perf_counter()
                stall_s = saver()["stall"]
                committed_s = time.perf_counter() - start
                if number >= GROWS_EVERY:  # the first saves are those of a new job
                    which = (GROWN, NEXT, SAME)[number % GROWS_EVERY]
                    found.setdefault(f"stall, {which}", []).append(stall_s)
                    found.setdefault(f"committed, {which}", []).append(committed_s)
        return {name: float(np.mean(values)) for name, values in found.items()}

    samples = bench.repeat({**beside.of(bytes_of(whole)), "job": job})
    case = f"A state of {begins * 8} MiB that grows by {by * 8} MiB at every third save; mean of {GROWTHS}"
    notes = {GROWN: "all ranks make room, and training waits for it", NEXT: "goes to the other slot"}
    for what in ("stall", "committed"):
        over = {**both(samples), "the third save": samples[f"{what}, {SAME}"]}
        for which in (GROWN, NEXT, SAME):
            note = notes.get(which, "")
            bench.rows(row(f"{what}, {which}", samples[f"{what}, {which}"], over, case=case, note=note))


def first(bench: Bench, beside: Yardsticks, nbytes: int) -> None:
    """Time the first save of a job against its fourth: not prepared, just prepared, and prepared a while before."""
    state = large_state(nbytes)
    all_made_s = 8 * nbytes / 1e9  # eight slots, at 1 GB/s
    cases = {"unprepared": (None, False), "unprepared, until=": (None, True), "just prepared": (0.0, False),
             "prepared": (all_made_s, False)}  # fmt: skip
    for when, (pause_s, is_until) in cases.items():
        job = functools.partial(four, bench, state, pause_s, is_until)
        actions: dict[str, Action] = {**beside.of(bytes_of(state)), "job": job}
        samples = bench.repeat(actions, before=lambda: change(state))
        for what in ("stall", "committed"):
            over = {**both(samples), WARM: samples[f"warm {what}"]}
            bench.rows(row(f"{what}, {when}", samples[f"first {what}"], over, "first", case="The first save of a job"))


def four(bench: Bench, state: State, pause_s: float | None, is_until: bool) -> dict[str, float]:
    """Save four times in a new job. Return the times of the first and the last save.

    Args:
        bench: the clock.
        state: the state that is saved.
        pause_s: seconds between `prepare` and the first save. None: `prepare` is not called.
        is_until: whether the first save gets an optimizer as ``until=``.
    """
    with bench.job("first") as job, bench.checkpointer(job, redundancy="copy") as ckpt:
        if pause_s is not None:
            ckpt.prepare(state)
            time.sleep(pause_s)
        saver, seconds = Saver(ckpt, state), []
        optimizer = torch.optim.SGD([*state.values()]) if is_until else None
        for number in range(4):
            bench.comm.Barrier()
            start = time.perf_counter()
            stalled = saver(None if number else optimizer)
            seconds.append({**stalled, "committed": time.perf_counter() - start})
    return {f"{name} {key}": s[key] for name, s in (("first", seconds[0]), ("warm", seconds[-1])) for key in s}


def main() -> None:
    out, memory, nbytes, repetitions = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    bench = Bench(MPI.COMM_WORLD, out, memory, repetitions, warm_up=1)
    beside = Yardsticks(bench.comm, memory, max(nbytes, SMALL_COUNT * SMALL_NBYTES))
    bench.header()
    small(bench, beside)
    models(bench, beside, nbytes)
    huge(bench, beside, nbytes)
    growing(bench, beside, nbytes)
    first(bench, beside, nbytes)
    beside.free()


if __name__ == "__main__":
    main()
