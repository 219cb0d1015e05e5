"""Measures difficult cases: small tensors, a huge one, 8 ranks, the first save.

    python benchmarks/sizes/run.py [--mib 128] [--repetitions 4] [--quick] [--json FILE]

Two ranks run on this machine under mpiexec, each on a node of its own. Then eight ranks run, once as one node
and once as two nodes of four.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from bench.aims import LOOP, MEMCPY, WARM
from bench.clock import Action, Bench, cpu
from bench.launch import Part
from bench.question import Question, parser_of
from bench.rows import row
from bench.states import Saver, State, Yardsticks, both, bytes_of, change, large_state

SMALL_COUNT, SMALL_NBYTES = 3000, 4096


def shapes(bench: Bench, nbytes: int) -> None:
    """Time saves of states of difficult shapes, and the first saves of jobs."""
    bench.warm_up = 1
    yardsticks = Yardsticks(bench.comm, bench.memory, max(nbytes, SMALL_COUNT * SMALL_NBYTES))
    small = {f"bias{i}": torch.full((SMALL_NBYTES // 4,), float(i)) for i in range(SMALL_COUNT)}
    many(bench, yardsticks, small, f"{SMALL_COUNT} tensors of {SMALL_NBYTES >> 10} KiB", "small")
    of_7b = weights_and_moments([*(32 * [1.0, 1e-4]), 3.0, 3.0, 1e-4], nbytes)  # layers, then embeddings
    many(bench, yardsticks, of_7b, f"{len(of_7b)} tensors in mixed precision, as of 7B", "stall")
    experts = weights_and_moments(3333 * [1.0], nbytes)
    many(bench, yardsticks, experts, f"{len(experts):,} tensors, as of a mixture of experts", "small")
    huge(bench, yardsticks, nbytes)
    first(bench, yardsticks, nbytes)
    yardsticks.free()


def many(bench: Bench, yardsticks: Yardsticks, state: State, case: str, aim: str) -> None:
    """Save many tensors. The aim "stall" is compared with a memcpy of each tensor, "small" with a loop of copy_."""
    copies = {name: value.clone() for name, value in state.items()}

    def loop() -> None:
        for name, value in state.items():
            copies[name].copy_(value)

    with bench.job("many") as job, bench.checkpointer(job, redundancy="copy") as ckpt:
        ckpt.prepare(state)
        pieces = bytes_of(state) if aim == "stall" else [np.concatenate(bytes_of(state))]
        actions: dict[str, Action] = {**yardsticks.of(pieces), "loop": loop, "save": Saver(ckpt, state)}
        samples = bench.repeat(actions, before=lambda: change(state))
    over = {MEMCPY: samples[MEMCPY]} if aim == "stall" else {LOOP: samples["loop"]}
    bench.rows(row(case, samples["stall"], over, aim, case="The stall of many tensors"))


def weights_and_moments(sizes: Sequence[float], nbytes: int) -> State:
    """Make weights of these relative sizes in half precision, and two moments of each in single precision."""
    state: State = {}
    for number, size in enumerate(sizes):
        count = max(1, int(nbytes / 10 * size / sum(sizes)))
        state[f"weight{number}"] = torch.ones(count, dtype=torch.bfloat16)
        state |= {f"{name}{number}": torch.full((count,), float(number)) for name in ("exp_avg", "exp_avg_sq")}
    return state


def huge(bench: Bench, yardsticks: Yardsticks, nbytes: int) -> None:
    state = {"embedding": torch.zeros(nbytes // 4)}
    with bench.job("huge") as job, bench.checkpointer(job, redundancy="copy") as ckpt:
        ckpt.prepare(state)
        actions: dict[str, Action] = {**yardsticks.of(bytes_of(state)), "save": Saver(ckpt, state)}
        samples = bench.repeat(actions, before=lambda: change(state))
    case = f"one tensor of {nbytes >> 20} MiB"
    bench.rows(
        row(f"{case}: stall", samples["stall"], {MEMCPY: samples[MEMCPY]}, "stall"),
        row(f"{case}: committed", samples["save"], both(samples), "committed"),
    )


def first(bench: Bench, yardsticks: Yardsticks, nbytes: int) -> None:
    """Time the first save of a job against its fourth."""
    state = large_state(nbytes)
    for title, is_prepared, is_late in (
        ("unprepared", False, False), ("unprepared, until=", False, True), ("prepared", True, False)
    ):  # fmt: skip

        def job(is_prepared: bool = is_prepared, is_late: bool = is_late) -> dict[str, float]:
            return first_and_fourth(bench, state, is_prepared, is_late)

        actions: dict[str, Action] = {**yardsticks.of(bytes_of(state)), "job": job}
        samples = bench.repeat(actions, before=lambda: change(state))
        over = {WARM: samples["warm stall"]}
        bench.rows(
            row(
                title,
                samples["first stall"],
                over,
                "first prepared" if is_prepared else "first",
                case="The stall of the first save of a job",
            )
        )


def first_and_fourth(bench: Bench, state: State, is_prepared: bool, is_late: bool) -> dict[str, float]:
    """Save four times in a new job, the first time with ``until=`` if it is late. Return first and last stall."""
    with bench.job("first") as job, bench.checkpointer(job, redundancy="copy") as ckpt:
        if is_prepared:
            ckpt.prepare(state)
        saver, stalls = Saver(ckpt, state), []
        optimizer = torch.optim.SGD([*state.values()]) if is_late else None
        for number in range(4):
            bench.comm.Barrier()
            stalls.append(saver(None if number else optimizer)["stall"])
    return {"first stall": stalls[0], "warm stall": stalls[-1]}


def many_ranks(bench: Bench, nbytes: int, nodes: int) -> None:
    """Save on all ranks of shared nodes, which do their memcpys at the same time too."""
    bench.warm_up = 1
    redundancy = "none" if nodes == 1 else "copy"
    state = large_state(nbytes)
    yardsticks = Yardsticks(bench.comm, bench.memory, nbytes)
    with bench.job("many") as job, bench.checkpointer(job, redundancy=redundancy) as ckpt:
        ckpt.prepare(state)
        actions: dict[str, Action] = {**yardsticks.of(bytes_of(state)), "save": Saver(ckpt, state)}
        samples = bench.repeat(actions, before=lambda: change(state))
    yardsticks.free()
    where = "one node" if nodes == 1 else f"{nodes} nodes"
    case = f"{bench.comm.size} ranks on {where}"
    cpu_seconds = cpu(samples)
    bench.rows(
        row(f"{case}: stall", samples["stall"], {MEMCPY: samples[MEMCPY]}, "stall"),
        row(f"{case}: CPU seconds", cpu_seconds["save"], {MEMCPY: cpu_seconds[MEMCPY]}, "cpu")
        if nodes == 1
        else row(f"{case}: committed", samples["save"], both(samples), "committed"),
    )


def main() -> int:
    parser = parser_of(__doc__, repetitions=4)
    parser.add_argument(
        "--mib", type=int, default=128, help="MiB of tensors per rank, a multiple of 8; each of 8 ranks has an eighth"
    )
    args = parser.parse_args()
    if args.mib < 64 or args.mib % 8:
        parser.error("--mib must be a multiple of 8, at least 64")
    if args.quick:
        args.mib, args.repetitions = 64, 1
    nbytes = args.mib << 20
    return Question(args).run([
        Part(2, shapes, {"nbytes": nbytes}),
        Part(8, many_ranks, {"nbytes": nbytes // 8, "nodes": 1}, per_node=8),
        Part(8, many_ranks, {"nbytes": nbytes // 8, "nodes": 2}, per_node=4),
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
