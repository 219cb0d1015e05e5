"""Measures how fast a save goes to another node with each transport, on one host and between network namespaces.

    python benchmarks/transport/run.py [--mib 64] [--repetitions 3] [--quick] [--json FILE]

Each of two ranks saves to the other, while its main thread waits or multiplies matrices. The two nodes that are apart
are made of namespaces (as root, on Linux). To compare MPIs, name the library of each in MLFLASH_LIBMPI.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

HOME = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(HOME), str(HOME.parent / "tests" / "support"), str(HOME.parent / "tests")]

import torch
from bench.aims import MEMCPY_AND_PUT
from bench.clock import Action, Bench
from bench.launch import Lines, Part, command_of, launch, lines_of, run_until
from bench.question import Question, parser_of
from bench.rows import row
from bench.states import Saver, Yardsticks, both, bytes_of, change, large_state

HOSTS = ("host1", "host2")
TRANSPORTS = ("p2p", "rma")
KILL_S = 10.0  # between SIGTERM and SIGKILL
MAINS = ("waits", "multiplies matrices")
OVER_UCX = {"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ucx"}
ON_ONE_HOST = {"one host": {}, "one host, UCX cma": {**OVER_UCX, "UCX_TLS": "posix,cma,self"}}
"""The variables of MPI by place. With ``cma`` the kernel copies between the processes, which is like RDMA."""

Run = Callable[[Part, int, float], tuple[str, Lines]]


def saves(bench: Bench, nbytes: int, place: str) -> None:
    """Save with both transports, while the main thread waits and while it computes."""
    state = large_state(nbytes)
    yardsticks = Yardsticks(bench.comm, bench.memory, nbytes)
    torch.set_num_threads(1)
    for transport in TRANSPORTS:
        settings = {"redundancy": "copy", "transport": transport}
        with bench.job(transport) as job, bench.checkpointer(job, **settings) as ckpt:
            ckpt.prepare(state)
            saver, busy = Saver(ckpt, state), Multiplying(ckpt, state)
            actions: dict[str, Action] = {**yardsticks.of(bytes_of(state)), MAINS[0]: saver, MAINS[1]: busy}
            samples = bench.repeat(actions, before=lambda: change(state))
        over = {MEMCPY_AND_PUT: both(samples)[MEMCPY_AND_PUT]}
        for main in MAINS:
            shows = "committed between hosts" if place.startswith("two nodes") and main == MAINS[0] else ""
            bench.rows(row(f"{place}, {transport}", samples[main], over, shows,
                           case="Until a save is committed on the other node, while the main thread ...",
                           column=main))  # fmt: skip
    yardsticks.free()


class Multiplying:
    """An action that saves, and multiplies small matrices until the save is committed."""

    def __init__(self, ckpt: Any, state: Any):
        self._ckpt, self._state = ckpt, state
        self._a, self._out = torch.rand(256, 256), torch.empty(256, 256)

    def __call__(self) -> None:
        snapshot = self._ckpt.save(self._ckpt.last_step + 1, self._state)
        while not snapshot.done:
            torch.mm(self._a, self._a, out=self._out)
        snapshot.wait()


def places() -> dict[str, Callable[[], contextlib.AbstractContextManager[Run]]]:
    """Return functions that open the places of this machine, by name."""
    from cluster.jobs import NETMODS  # the project's model of nodes, which the ranks do not need
    from cluster.nodes import TOOLS

    opened: dict[str, Callable[[], contextlib.AbstractContextManager[Run]]] = {}
    for name, variables in ON_ONE_HOST.items():
        opened[name] = functools.partial(on_one_host, variables)
    if os.geteuid() == 0 and all(map(shutil.which, TOOLS)):
        for name in NETMODS:
            opened[f"two nodes, {name}"] = functools.partial(on_two_nodes, NETMODS[name])
    return opened


@contextlib.contextmanager
def on_one_host(variables: dict[str, str]) -> Iterator[Run]:
    with mock.patch.dict(os.environ, variables):
        yield launch


@contextlib.contextmanager
def on_two_nodes(variables: dict[str, str]) -> Iterator[Run]:
    """Make two nodes from namespaces, each with its own network and one rank."""
    from cluster.jobs import mpiexec_on
    from cluster.nodes import Nodes

    with Nodes(HOSTS) as nodes:

        def run(part: Part, repetitions: int, timeout_s: float) -> tuple[str, Lines]:
            out = nodes.path / "out.jsonl"
            argv, environment = command_of(part, repetitions, out, "/dev/shm")
            environment |= {**variables, "OMP_NUM_THREADS": "1"}
            assignments = [f"{name}={value}" for name, value in environment.items()]
            command = mpiexec_on(nodes, HOSTS, 1, ["env", *assignments, *argv])
            try:
                why = run_until(command, timeout_s, KILL_S, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
                return why, lines_of(out)
            finally:
                nodes.stop_all()

        yield run


def main() -> int:
    parser = parser_of(__doc__, repetitions=3, timeout_s=120)
    names = list(places())
    parser.add_argument("--mib", type=int, default=64, help="MiB per rank and direction, a multiple of 8")
    parser.add_argument("--place", nargs="+", choices=names, default=names, help="places of the two ranks")
    args = parser.parse_args()
    if args.quick:
        args.mib, args.repetitions, args.place = 8, 2, names[:1]
    question = Question(args)
    for place in args.place:
        part = Part(2, saves, {"nbytes": args.mib << 20, "place": place})
        with places()[place]() as run:
            why, lines = run(part, args.repetitions, args.timeout_s)
        question.add(lines)
        question.wrong += [f"{place}: {why}"] * bool(why)
    return question.finish()


if __name__ == "__main__":
    sys.exit(main())
