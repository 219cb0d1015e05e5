"""Measures how fast slots are protected by copies and parity, and how fast lost slots are rebuilt.

    python benchmarks/parity/run.py [--ranks 4] [--mib 64] [--repetitions 9] [--quick] [--json FILE]

The ranks run on this machine under mpiexec, each on a node of its own. The time of a scheme is that
from the return of `save` until the commit: checksums of every block at both ends, and the agreement of all ranks.
"""

from __future__ import annotations

import logging
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from bench.aims import MEMCPY, REDSET
from bench.clock import Action, Bench
from bench.launch import Part
from bench.question import Question, parser_of
from bench.rows import row
from bench.states import State, Yardsticks, bytes_of, change, large_state

from mlflash import Checkpointer

REDSET_RATE = {"xor": 1.20e9, "rs": 0.46e9}  # published rate of LLNL's redset: bytes per second of all slots together


def schemes(bench: Bench, nbytes: int) -> None:
    """Time saves of all schemes, and restores after as many nodes were wiped as parity covers."""
    logging.getLogger("mlflash").setLevel("ERROR")  # it warns of a step that is restored again and again
    ranks, state = bench.comm.size, large_state(nbytes)
    yardsticks = Yardsticks(bench.comm, bench.memory, nbytes)
    for scheme, losses in (("copy", 0), (f"xor:{ranks}", 1), (f"rs:{ranks - 2}+2", 2)):
        with bench.job(scheme.replace(":", "-").replace("+", "-")) as job:
            with bench.checkpointer(job, redundancy=scheme) as ckpt:
                ckpt.prepare(state)
                actions: dict[str, Action] = {
                    MEMCPY: lambda: yardsticks.memcpy(bytes_of(state)),
                    "save": Protect(ckpt, state),
                }
                samples = bench.repeat(actions, before=lambda: change(state))
            seconds, name = samples["protect"], scheme.partition(":")[0]
            over = {MEMCPY: samples[MEMCPY]}
            if name in REDSET_RATE:
                over[REDSET] = np.array(nbytes * ranks / REDSET_RATE[name])
            rate = f"{nbytes * ranks / np.median(seconds) / 1e9:.2f} GB/s"
            bench.rows(row(scheme, seconds, over, name if name in REDSET_RATE else "", note=rate))
            if losses:
                rebuild(bench, yardsticks, state, job, scheme, losses)
    yardsticks.free()


class Protect:
    """An action that saves, and returns the time from the return of `save` until the commit."""

    def __init__(self, ckpt: Checkpointer, state: State):
        self._ckpt, self._state = ckpt, state

    def __call__(self) -> dict[str, float]:
        snapshot = self._ckpt.save((self._ckpt.last_step or 0) + 1, self._state).wait()
        return {"protect": (snapshot.commit_s or 0.0) - snapshot.stall_s}


def rebuild(bench: Bench, yardsticks: Yardsticks, state: State, job: str, scheme: str, losses: int) -> None:
    """Restore again and again, each time after the first nodes were wiped."""

    def restore() -> dict[str, float]:
        if bench.comm.rank < losses:
            shutil.rmtree(bench.directory_of(job))
        bench.comm.Barrier()
        with bench.checkpointer(job, redundancy=scheme) as ckpt:  # its exit waits until all parity is reprotected
            ckpt.restore(state)
            return {"rebuild": ckpt.report()["seconds"]["find and fetch"]}

    samples = bench.repeat({MEMCPY: lambda: yardsticks.memcpy(bytes_of(state)), "restore": restore})
    what = f"{scheme}: find, verify and rebuild {losses} lost"
    bench.rows(row(what, samples["rebuild"], {MEMCPY: samples[MEMCPY]}))


def main() -> int:
    parser = parser_of(__doc__, repetitions=9)
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks, 4 or more")
    parser.add_argument("--mib", type=int, default=64, help="MiB per rank, a multiple of 8")
    args = parser.parse_args()
    if args.ranks < 4:
        parser.error("--ranks must be 4 or more")
    if args.quick:
        args.mib, args.repetitions = 8, 3
    return Question(args).run([Part(args.ranks, schemes, {"nbytes": args.mib << 20})])


if __name__ == "__main__":
    sys.exit(main())
