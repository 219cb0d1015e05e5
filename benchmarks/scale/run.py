"""Measures what grows with the number of ranks: planning, inventory, the choice of a checkpoint, agreement, wire-up.

    python benchmarks/scale/run.py [--ranks 1024 16384 131072] [--quick] [--json FILE]

Planning, inventory and choice are the work of one rank of a large job, 8 ranks on a node. Its code runs here on tables
of that size, without MPI. Agreement is counted on 2 to 8 real ranks under mpiexec. wireup.py replays the requests of
thousands of ranks that start.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SUPPORT = HERE.parents[1] / "tests" / "support"
sys.path[:0] = [str(HERE), str(HERE.parent), str(SUPPORT)]

import in_couriers
import numpy as np
from bench.aims import MEGABYTE, ONE, SECOND
from bench.clock import Bench
from bench.launch import Part
from bench.question import Question, parser_of
from bench.rows import Row
from wireup import Start

from mlflash.commit.earlier_runs import choose
from mlflash.memory.inventory import FOUND, Inventory, decode, encode, join
from mlflash.memory.slot import Kind
from mlflash.placement.failure_domains import from_lines
from mlflash.placement.redundancy import Placement, parse, place
from mlflash.placement.survival import describe, of
from mlflash.placement.topology import Topology, from_node_ids

SCHEMES = ("copy", "xor:8", "rs:6+2")
AIMED_RANKS = 16_384
PER_NODE, NODES_PER_RACK, RACKS_PER_ROW = 8, 32, 8
GENERATION = 42
RUN = (0x3F9C_11D7_A6E2_5B48, 0xC471_0E8D_92F3_6AB5)
SAVES = 4  # the last one is counted, since the first ones create slots and agree on the structure


def planning(ranks: int, scheme: str) -> Iterator[Row]:
    """Yield what one rank of a large job does alone, in CPU seconds."""
    places = places_of(ranks // PER_NODE)
    planning_s, (topology, placement) = cpu_seconds(lambda: plan(ranks, scheme, places))
    parts = inventories(topology, placement)
    packed = [encode(part) for part in parts]
    received_mb = sum(map(len, packed)) / 1e6
    join_s, inventory = cpu_seconds(lambda: join([decode(part) for part in packed]))
    lost = Inventory(inventory.rows[inventory.rows["node"] != len(parts) // 2], inventory.groups)
    choice_s, choice = cpu_seconds(lambda: choose(lost, topology.node_of))
    assert choice is not None and choice.attempt.generation == GENERATION, "one lost node was not survived"
    where = Row(what=f"{ranks:,} ranks, {scheme}", case="One rank alone, CPU seconds")
    is_aimed = ranks == AIMED_RANKS
    for column, seconds in (("planning", planning_s), ("join", join_s), ("choice", choice_s)):
        yield {**where, "column": column, "seconds": seconds, "over": {SECOND: 3 * [seconds]},
               "shows": "planning" if is_aimed and column == "planning" else ""}  # fmt: skip
    yield {**where, "column": "inventory of all nodes, MB", "over": {MEGABYTE: 3 * [received_mb]},
           "shows": "inventory" if is_aimed else "", "note": f"{received_mb:.2f}"}  # fmt: skip


def cpu_seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def places_of(nodes: int) -> list[tuple[str, ...]]:
    """Read a file of failure domains for this number of nodes, and give the row and rack of each."""
    lines = ["levels: row rack"]
    for first in range(0, nodes, NODES_PER_RACK):
        rack = first // NODES_PER_RACK
        last = min(first + NODES_PER_RACK, nodes) - 1
        lines.append(f"n[{first:06d}-{last:06d}] row{rack // RACKS_PER_ROW} rack{rack}")
    domains = from_lines("\n".join(lines))
    return [domains.names(f"n{node:06d}") for node in range(nodes)]


def plan(ranks: int, scheme: str, places: Sequence[tuple[str, ...]]) -> tuple[Topology, Placement]:
    """Plan as every rank does when it creates a Checkpointer."""
    topology = from_node_ids([(rank // PER_NODE * PER_NODE, f"n{rank // PER_NODE:06d}") for rank in range(ranks)])
    placement = place(topology, parse(scheme), places)
    assert placement.owners and placement.connected and placement.parity_group_of is not None
    survival = of(topology, placement)
    assert describe(survival, {"row": [row for row, _ in places], "rack": [rack for _, rack in places]})
    return topology, placement


def inventories(topology: Topology, placement: Placement) -> list[Inventory]:
    """Generate what the first rank of each node finds: two slots of each rank, and two of each copy and parity file."""
    parts = []
    for node, ranks in enumerate(topology.ranks_on):
        groups = list(dict.fromkeys(filter(None, (placement.parity_group_of[rank] for rank in ranks))))
        # Rank, number of the group, parity blocks of a stripe.
        files = [(rank, 0, 0) for rank in ranks]
        files += [(owner, 0, 0) for rank in ranks for owner in placement.owners[rank]]
        files += [(rank, groups.index(group), placement.scheme.losses) for rank in ranks
                  if (group := placement.parity_group_of[rank])]  # fmt: skip
        rows = np.zeros(2 * len(files), dtype=FOUND)
        rows["rank"], rows["group"], rows["number"] = np.repeat(np.array(files), 2, axis=0).T
        rows["kind"], rows["shared_by"] = np.where(rows["number"] > 0, Kind.PARITY, Kind.SLOT), -1
        rows["generation"], rows["step"] = np.tile([[GENERATION - 1, 410], [GENERATION, 420]], (len(files), 1)).T
        rows["node"], rows["file"], rows["world_size"] = node, np.arange(rows.size), len(topology.node_of)
        rows["run_0"], rows["run_1"] = RUN
        parts.append(Inventory(rows, tuple(groups)))
    return parts


def wire_up(nodes: int) -> Start:
    """Start all ranks at once, in a process that has loaded nothing else, so that its memory is that of the hub."""
    program = f"import json, wireup; print(json.dumps(wireup.wire_up({nodes}, {PER_NODE})))"
    done = subprocess.run([sys.executable, "-c", program], cwd=HERE, stdout=subprocess.PIPE, text=True, check=True)
    return Start(*json.loads(done.stdout))


def agreement(bench: Bench) -> None:
    """Count the collectives of a start, a commit and a restore, which couriers call."""
    logging.getLogger("mlflash").setLevel(logging.ERROR)
    state = {"weights": np.ones(1 << 20, np.float32)}
    counted = counted_in_couriers(bench.memory / f"counts-{bench.comm.rank}")
    counts: dict[str, Counter[str]] = {}
    with bench.job("agreement") as job:
        with bench.checkpointer(job, redundancy="copy") as ckpt:
            counts["start"] = counted()
            for step in range(SAVES):
                ckpt.steps()  # after the end of the last save
                before = counted()
                ckpt.save(step, state).wait()
            counts["commit"] = counted() - before
        with bench.checkpointer(job, redundancy="copy") as ckpt:
            before = counted()
            assert ckpt.restore(state) == SAVES - 1
            counts["restore"] = counted() - before
    for column, calls in counts.items():
        nbytes, allreduces = calls["into collectives"], calls["Iallreduce"]
        others = sum(calls[name] for name in in_couriers.COLLECTIVES) - allreduces
        bench.rows(Row(what=f"{bench.comm.size} ranks", case="Calls of rank 0: allreduces; other collectives, bytes",
                       column=column, over={ONE: 3 * [float(allreduces)]}, note=f"{allreduces}; {others}, {nbytes} B",
                       shows="commit" if column == "commit" else ""))  # fmt: skip


def counted_in_couriers(path: Path) -> Callable[[], Counter[str]]:
    """Let the courier that this rank is about to start count its calls in a file. Return what gives their numbers."""
    in_couriers.reach_into_couriers()
    os.environ |= {"PYTHONPATH": f"{SUPPORT}:{os.environ['PYTHONPATH']}", in_couriers.NAME: "counted",
                   in_couriers.COUNTS: str(path)}  # fmt: skip
    return in_couriers.Counts(path).all


def main() -> int:
    parser = parser_of(__doc__, repetitions=1)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1024, AIMED_RANKS, 131_072], help="numbers of ranks, multiples of 64"
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[64, 512], help="numbers of nodes that start")
    args = parser.parse_args()
    if any(ranks < 128 or ranks % 64 for ranks in args.ranks):
        parser.error("--ranks must be multiples of 64, at least 128")
    if args.quick:
        args.ranks, args.nodes = [1024], [8]
    question = Question(args)
    for ranks in args.ranks:
        for scheme in SCHEMES:
            question.add(planning(ranks, scheme))
    for nodes in args.nodes:
        start = wire_up(nodes)
        note = f"{start.hub_s:.2f} s, {start.hub_mib:.0f} MiB; a node {start.node_s * 1e3:.0f} ms"
        case = "Wire-up: CPU time and memory of the hub, and CPU time of a node's agent"
        question.add([Row(what=f"{nodes * PER_NODE:,} ranks on {nodes} nodes", case=case, note=note)])
    return question.run([Part(size, agreement) for size in ([2] if args.quick else [2, 4, 8])])


if __name__ == "__main__":
    sys.exit(main())
