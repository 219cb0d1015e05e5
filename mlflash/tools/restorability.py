"""What the memory of nodes can restore, and which losses that survives. It takes files away and tries, for any scheme.

Pure: it works on the results of `node_memory`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence

from ..commit.earlier_runs import Choice, choose
from ..errors import ConfigError
from ..memory.inventory import NEWEST, Inventory, WantedStep
from ..memory.slot import Attempt, Header, Kind, Verdict
from ..placement.redundancy import Scheme, parse
from ..text import listed
from .node_memory import Node, inventory_of

_PAIRS_OF = 64  # with more nodes, pairs are not tried
_NAMED = 3


@dataclasses.dataclass(frozen=True)
class Prospect:
    """An attempt to save a step that has files in memory."""

    attempt: Attempt
    step: int
    world_size: int
    scheme: str
    unix_ns: int
    committed: bool
    restores: int
    nbytes: int
    verdict: Verdict
    choice: Choice | None  # how to restore it. None: it cannot be restored
    missing: tuple[int, ...]  # the ranks that have no slot, whether or not parity can rebuild it


@dataclasses.dataclass(frozen=True)
class Restorability:
    """What the nodes can restore."""

    prospects: tuple[Prospect, ...]
    unseen: tuple[str, ...]  # nodes that headers name, but that were not looked at

    @property
    def newest(self) -> Prospect | None:
        """The attempt that a restore takes: the newest one that is not marked bad. None if there is none."""
        whole = (prospect for prospect in self.prospects if prospect.choice is not None)
        return next((prospect for prospect in whole if NEWEST.fits(prospect.step, prospect.verdict)), None)

    @property
    def lost(self) -> Prospect | None:
        """The newest attempt, if it was committed but these nodes cannot restore it. None otherwise."""
        known = (prospect for prospect in self.prospects if prospect.committed or prospect.choice is not None)
        first = next(known, None)
        return first if first is not None and first.choice is None else None


def what_is_restorable(nodes: Sequence[Node], together: bool) -> Restorability:
    """Say what some nodes can restore. ``together``: according to the launcher, these are all nodes that are left."""
    inventory = inventory_of(list(nodes))
    headers: dict[Attempt, list[tuple[Header, bool, int, int]]] = {}
    for node in nodes:
        for file, header in node.sealed:
            headers.setdefault(header.attempt, []).append((header, file.committed, file.restores, file.nbytes))
    prospects = []
    for attempt, step, world_size in inventory.attempts():
        files = headers[attempt]
        slots = {header.rank for header, *_ in files if header.kind is Kind.SLOT}
        prospects.append(
            Prospect(
                attempt, step, world_size, recorded_scheme(header.scheme for header, *_ in files),
                max(header.unix_ns for header, *_ in files), any(committed for _, committed, *_ in files),
                max(restores for _, _, restores, _ in files), sum(nbytes for *_, nbytes in files),
                inventory.of(attempt).verdict,
                choose(inventory.of(attempt), (), WantedStep(step)), tuple(sorted(set(range(world_size)) - slots)),
            )
        )  # fmt: skip
    seen = {node.name for node in nodes}
    named = {header.node for files in headers.values() for header, *_ in files}
    return Restorability(tuple(prospects), () if together else tuple(sorted(named - seen)))


def recorded_scheme(texts: Iterable[str]) -> str:
    """Return the scheme of an attempt from the headers of its files. If some ranks have copies, it is that of parity.

    Example:
        xor:4, xor:5 and copy → xor:4, because groups may be larger than named, and a rank without a group has a copy.
    """
    schemes: list[Scheme] = []
    for text in set(texts):
        try:
            schemes.append(parse(text))
        except ConfigError:
            continue
    best = min(schemes, key=lambda scheme: (not scheme.parity, -scheme.losses, scheme.members), default=None)
    return "none" if best is None else str(best)


@dataclasses.dataclass(frozen=True)
class Survival:
    """The losses of nodes that an attempt survives with its present files."""

    nodes: int
    fatal: tuple[str, ...]
    pairs: int  # number of pairs of nodes; 0 if pairs were not tried
    fatal_pairs: tuple[tuple[str, str], ...]  # although each node of them alone may be lost

    @property
    def surviving_pairs(self) -> int:
        single, good = len(self.fatal), self.nodes - len(self.fatal)
        return self.pairs - single * good - math.comb(single, 2) - len(self.fatal_pairs) if self.pairs else 0

    def __str__(self) -> str:
        """Describe the losses in words.

        Example:
            "any 1 of 4 nodes; 4 of 6 pairs of nodes; not: n0 and n2 together, n1 and n3 together"; "any 1 of 3 nodes
            except n2".
        """
        if self.nodes == 1:
            return f"no node: there is only {self.fatal[0]}"
        if len(self.fatal) == self.nodes:
            return "no node"
        but = f" except {listed(self.fatal, _NAMED)}" if self.fatal else ""
        text = [f"any 1 of {self.nodes} nodes{but}"]
        if good := self.surviving_pairs:
            text.append(f"any 2 of {self.nodes} nodes" if good == self.pairs else
                        f"{good:,} of {self.pairs:,} pairs of nodes")  # fmt: skip
        if self.surviving_pairs and self.fatal_pairs:
            text.append("not: " + listed([f"{a} and {b} together" for a, b in self.fatal_pairs], _NAMED))
        return "; ".join(text)


def survival(nodes: Sequence[Node], of: Prospect) -> Survival:
    """Find the losses that a restorable attempt survives, by trying each of them."""
    inventory = inventory_of(list(nodes)).of(of.attempt)
    numbers = sorted(set(inventory.rows["node"].tolist()))

    def fatal(*lost: int) -> bool:
        rows = inventory.rows
        for node in lost:
            rows = rows[rows["node"] != node]
        return not rows.size or choose(Inventory(rows, inventory.groups), (), WantedStep(of.step)) is None

    single = [node for node in numbers if fatal(node)]
    pairs = 0 if len(numbers) > _PAIRS_OF else math.comb(len(numbers), 2)
    tied = [pair for pair in _tied(inventory) if pairs and not set(pair) & set(single)]
    names = [node.name for node in nodes]
    return Survival(len(numbers), tuple(names[node] for node in single), pairs,
                    tuple((names[a], names[b]) for a, b in tied if fatal(a, b)))  # fmt: skip


def _tied(inventory: Inventory) -> list[tuple[int, int]]:
    """Return pairs of nodes that are the only holders of something. All other pairs may be lost."""
    holders: dict[tuple[str, int, int], set[int]] = {}
    groups: dict[int, set[int]] = {}
    for row in inventory.rows:
        rank, node = int(row["rank"]), int(row["node"])
        if row["kind"] == Kind.SHARE:
            holders.setdefault(("share", int(row["shared_by"]), int(row["number"])), set()).add(node)
        elif row["kind"] == Kind.PARITY:
            groups.setdefault(int(row["group"]), set()).add(node)
        else:
            holders.setdefault(("slot", rank, 0), set()).add(node)
    tied = [nodes for nodes in holders.values() if len(nodes) == 2]
    for number, nodes in groups.items():
        tied.append(nodes | {node for rank in inventory.groups[number] for node in holders.get(("slot", rank, 0), ())})
    return sorted({pair for nodes in tied for pair in itertools.combinations(sorted(nodes), 2)})
