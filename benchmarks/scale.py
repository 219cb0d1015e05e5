"""How planning and inventory grow with the job: 1,024 to 131,072 simulated ranks, 8 on a node.

    python benchmarks/scale.py [--ranks N ...] [--samples 20000] [--seed 1] [--quick] [--json FILE] [--plot FILE]

No rank runs and no MPI is needed: it is the code that every rank runs when a Checkpointer is made, on the tables that
so many ranks would give it. Random losses go through `Survival.survives`, some also through the choice of what to
restore, and are compared with the exact chance. Ends with 1 where these contradict each other.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from mlflash import __version__
from mlflash.header import Kind
from mlflash.inventory import FOUND, Inventory, choose, decode, encode, join
from mlflash.placement import Placement, place
from mlflash.scheme import parse
from mlflash.survival import Survival, describe, of
from mlflash.topology import Topology, from_node_ids

SCHEMES = ("copy", "xor:8", "rs:6+2")
RANKS = (1024, 4096, 16_384, 65_536, 131_072)
PER_NODE, NODES_PER_RACK, RACKS_PER_ROW = 8, 32, 8
CHOICES = 3  # losses that also go through the choice of what to restore
PLANNING_S, INVENTORY_MB, AIMED_RANKS = 1.0, 4.0, 16_384
RUN = (0x3F9C_11D7_A6E2_5B48, 0xC471_0E8D_92F3_6AB5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="sizes of the job, multiples of 8")
    parser.add_argument("--samples", type=int, default=20_000, help="random losses")
    parser.add_argument("--seed", type=int, default=1, help="of the random losses")
    parser.add_argument("--quick", action="store_true", help="1,024 and 16,384 ranks, few losses: a few seconds")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--plot", type=Path, help="draw seconds and bytes against ranks (needs matplotlib)")
    args = parser.parse_args()
    if any(ranks < 4 * PER_NODE or ranks % PER_NODE for ranks in args.ranks):
        parser.error("--ranks must be multiples of 8, at least 32")
    if args.quick:
        args.ranks, args.samples = (1024, 16_384), 2000
    header = {"cpus": os.cpu_count(), "load average before": os.getloadavg()[0], "mlflash": __version__,
              "python": platform.python_version(), "numpy": np.__version__, "samples": args.samples,
              "seed": args.seed}  # fmt: skip
    rows = [measure(ranks, scheme, args.samples, args.seed) for ranks in args.ranks for scheme in SCHEMES]
    header["load average after"] = os.getloadavg()[0]
    show(header, rows)
    if args.json is not None:
        args.json.write_text(json.dumps({"header": header, "rows": [vars(row) for row in rows]}, indent=1) + "\n")
    if args.plot is not None:
        draw(args.plot, rows)
    for row in rows:
        if row.wrong:
            print(f"scale: {row.ranks:,} ranks, {row.scheme}: {row.wrong}", file=sys.stderr)
    return int(any(row.wrong for row in rows))


@dataclasses.dataclass
class Row:
    """What was measured for one scheme and size; seconds of processor time on one rank.

    Attributes:
        groups: redundancy groups of ranks.
        planning_s: topology, placement, who holds what of whom, what it survives, in words.
        lost: nodes lost at once in the simulation.
        exact, simulated, error: probability that memory is enough; the standard error of the simulated one.
        sent_nbytes: inventory of one node on the wire.
        received_mb: those of all nodes.
        table_mb: what every rank holds of them while it chooses.
        join_s: decoding them and putting them together.
        choose_s: the choice of what to restore, with one node lost.
        wrong: what contradicts what; "": nothing.
    """

    ranks: int
    scheme: str
    groups: int = 0
    planning_s: float = 0.0
    lost: int = 0
    exact: float = 0.0
    simulated: float = 0.0
    error: float = 0.0
    sent_nbytes: float = 0.0
    received_mb: float = 0.0
    table_mb: float = 0.0
    join_s: float = 0.0
    choose_s: float = 0.0
    wrong: str = ""


def measure(ranks: int, scheme: str, samples: int, seed: int) -> Row:
    """Measure one scheme with so many ranks."""
    row = Row(ranks, scheme)
    row.planning_s, (topology, placed, found) = timed(lambda: plan(ranks, scheme))
    row.groups = len(placed.parity_groups) or len(set(placed.connected))
    rng = random.Random(seed)
    row.lost, row.exact = open_loss(found)
    losses = [rng.sample(range(found.nodes), row.lost) for _ in range(samples)]
    outcomes = [found.survives(lost) for lost in losses]
    row.simulated = sum(outcomes) / samples
    row.error = math.sqrt(row.exact * (1 - row.exact) / samples)
    if abs(row.simulated - row.exact) > 5 * row.error:
        row.wrong = f"simulated {row.simulated}, exact {row.exact} ± {row.error}"

    parts = inventories(topology, placed)
    packed = [encode(part) for part in parts]
    row.sent_nbytes = sum(map(len, packed)) / len(packed)
    row.received_mb = sum(map(len, packed)) / 1e6
    row.join_s, everything = timed(lambda: join([decode(part) for part in packed]))
    row.table_mb = (
        everything.rows.nbytes + sum(40 + 40 * len(group) for group in everything.groups)
    ) / 1e6  # tuples of int
    one = without(everything, [found.nodes // 2])
    row.choose_s, choice = timed(lambda: choose(one, topology.node_of))
    if choice is None or choice.attempt.generation != 42:
        row.wrong = "one lost node was too much"
    for number in {*range(CHOICES), *(outcomes.index(outcome) for outcome in set(outcomes))}:
        restorable = choose(without(everything, losses[number]), topology.node_of) is not None
        if restorable != outcomes[number]:
            row.wrong = f"nodes {sorted(losses[number])}: survived {outcomes[number]}, restorable {restorable}"
    return row


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Do something; returns the seconds of processor time, and its result."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def plan(ranks: int, scheme: str) -> tuple[Topology, Placement, Survival]:
    """What every rank plans when a Checkpointer is made."""
    nodes = range(ranks // PER_NODE)
    racks = [f"rack{node // NODES_PER_RACK}" for node in nodes]
    rows = [f"row{node // NODES_PER_RACK // RACKS_PER_ROW}" for node in nodes]
    topology = from_node_ids([(rank // PER_NODE * PER_NODE, f"n{rank // PER_NODE}") for rank in range(ranks)])
    placed = place(topology, parse(scheme), list(zip(rows, racks, strict=True)))
    assert placed.owners and placed.connected and placed.parity_group_of is not None
    found = of(topology, placed)
    assert describe(found, {"row": rows, "rack": racks})
    return topology, placed, found


def open_loss(found: Survival) -> tuple[int, float]:
    """A number of nodes of which a random loss is neither surely survived nor surely not, and the exact chance."""
    most = round(found.nodes ** (2 / 3))
    good = found.surviving(most)
    chances = [count / math.comb(found.nodes, lost) for lost, count in enumerate(good)]
    lost = min(range(1, most + 1), key=lambda lost: abs(chances[lost] - 0.5))
    return lost, chances[lost]


def inventories(topology: Topology, placed: Placement) -> list[Inventory]:
    """What the leader of each node finds: two slots of each rank, and two of each copy and parity file it holds."""
    found = []
    for node, ranks in enumerate(topology.ranks_on):
        groups = list(dict.fromkeys(placed.parity_group_of[rank] for rank in ranks if placed.parity_group_of[rank]))
        # Rank, number of the group, parity blocks of a stripe.
        files = [(rank, 0, 0) for rank in ranks]
        files += [(owner, 0, 0) for rank in ranks for owner in placed.owners[rank]]
        files += [(rank, groups.index(group), placed.scheme.losses) for rank in ranks
                  if (group := placed.parity_group_of[rank])]  # fmt: skip
        rows = np.zeros(2 * len(files), dtype=FOUND)
        rows["rank"], rows["group"], rows["number"] = np.repeat(np.array(files), 2, axis=0).T
        rows["kind"], rows["shared_by"] = np.where(rows["number"] > 0, Kind.PARITY, Kind.SLOT), -1
        rows["generation"], rows["step"] = np.tile([[41, 410], [42, 420]], (len(files), 1)).T
        rows["node"], rows["file"], rows["world_size"] = node, np.arange(rows.size), len(topology.node_of)
        rows["run_0"], rows["run_1"] = RUN
        found.append(Inventory(rows, tuple(groups)))
    return found


def without(everything: Inventory, nodes: Sequence[int]) -> Inventory:
    return Inventory(everything.rows[~np.isin(everything.rows["node"], list(nodes))], everything.groups)


def show(header: dict[str, Any], rows: Sequence[Row]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 140)
    for name, value in header.items():
        console.print(f"{name}: {value}", highlight=False)
    losses = Table("ranks", "scheme", "groups", "nodes lost at once", "memory is enough", "simulated", "± error")
    costs = Table("ranks", "scheme", "planning, s", "inventory: sent by a node, B", "by all, MB", "table of a rank, MB",
                  "put together, s", "choice, s")  # fmt: skip
    for row in rows:
        aimed, end = row.ranks <= AIMED_RANKS, row.scheme == SCHEMES[-1]
        losses.add_row(f"{row.ranks:,}", row.scheme, f"{row.groups:,}", str(row.lost), f"{row.exact:.4f}",
                       f"{row.simulated:.4f}", f"{row.error:.4f}", end_section=end)  # fmt: skip
        costs.add_row(f"{row.ranks:,}", row.scheme, aim(row.planning_s, PLANNING_S, aimed, 3), f"{row.sent_nbytes:.0f}",
                      aim(row.received_mb, INVENTORY_MB, aimed, 2), f"{row.table_mb:.1f}", f"{row.join_s:.2f}",
                      f"{row.choose_s:.2f}", end_section=end)  # fmt: skip
    for table in (losses, costs):
        for column in table.columns[2:]:
            column.justify = "right"
        console.print(table)
    console.print(f"aims up to {AIMED_RANKS:,} ranks: planning ≤ {PLANNING_S:g} s; sent by all ≤ {INVENTORY_MB:g} MB")


def aim(value: float, most: float, aimed: bool, digits: int) -> str:
    style = "" if not aimed else "[green]" if value <= most else "[red]"
    return f"{style}{value:.{digits}f}"


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Draw a band for each quantity, from the scheme with least to the one with most."""
    from matplotlib.figure import Figure

    ranks = sorted({row.ranks for row in rows})
    figure = Figure(figsize=(10, 4.2), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    panels: list[tuple[Any, str, dict[str, str], float, str]] = [
        (left, "seconds on each rank", {"planning_s": "planning", "join_s": "inventory", "choose_s": "choice"},
         PLANNING_S, "aim for planning"),
        (right, "megabytes", {"table_mb": "table of a rank", "received_mb": "sent by all nodes"},
         INVENTORY_MB, "aim for what is sent"),
    ]  # fmt: skip
    for axes, unit, names, most, text in panels:
        axes.plot([ranks[0], AIMED_RANKS], [most, most], color="0.85", linewidth=5, zorder=0)
        axes.annotate(text, (ranks[0], most), (0, 6), textcoords="offset points", fontsize=9, color="0.4")
        free = 0.0
        found = [(name, [[getattr(row, name) for row in rows if row.ranks == n] for n in ranks]) for name in names]
        for number, (name, values) in enumerate(sorted(found, key=lambda one: max(one[1][-1]))):
            highest, shade = [max(some) for some in values], str(0.3 * number)
            axes.fill_between(ranks, [min(some) for some in values], highest, color=shade, alpha=0.15, linewidth=0)
            axes.loglog(ranks, highest, ("-", "--", "-.")[number], color=shade, linewidth=1.8, marker="o", markersize=4)
            free = max(highest[-1], 1.6 * free)  # labels of lines that meet stand above each other
            axes.annotate(names[name], (ranks[-1], free), (8, -3), textcoords="offset points", fontsize=9, color=shade,
                          annotation_clip=False)  # fmt: skip
        axes.set_xticks(ranks, [f"{n:,}" for n in ranks], rotation=30, ha="right")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
        axes.set_xlabel("ranks, 8 on a node")
        axes.set_title(unit, fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
