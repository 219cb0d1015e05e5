"""What each redundancy scheme would give a job: memory, what may be lost, how often that is not enough, what it costs.

Nothing here is taken from the name of a scheme: it is placed over the nodes as a Checkpointer places it, and what the
placement survives is counted.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from functools import cached_property

from ..errors import ConfigError
from ..human_readable.wording import many
from ..memory.memory_limits import headroom
from ..memory.parity_layout import parity_extents
from ..placement import survival
from ..placement.protection_groups import Placement, made, place
from ..placement.redundancy_scheme import Scheme, parse
from ..placement.topology import Topology
from ..redundancy.deduplication import cuts
from ..state.layout import ALIGN_NBYTES, PAGE_NBYTES, Extents, round_up
from .interval import Costs, best_interval, waste

SCHEMES = ("none", "copy", "copy:2", "xor:4", "xor:8", "rs:6+2", "rs:8+2", "rs:8+3")
MOST_RANKS = 1 << 20
_LATER_LOSSES = 64  # further nodes lost during one recovery; more of them are taken as too many


@dataclasses.dataclass(frozen=True)
class Job:
    """A job to plan for.

    Attributes:
        node_names: of its nodes, in their order.
        ranks_per_node: ranks on each.
        nbytes: of state, on each rank.
        alike_nbytes: of these, what all ranks hold alike: stored once on each node.
        kinds: levels of failure domains, outermost first.
        places: for each node its domain at each level; empty: nothing is known.
        memory_nbytes: what a node can give to checkpoints; None: not known.
        own_slots: of each rank: two; a third where it drains, and one or two more where steps are certified.
        copy_slots: for each copy and each parity file: two, and as many more where steps are certified.
        block_nbytes: bytes per checksum.
    """

    node_names: tuple[str, ...]
    ranks_per_node: int
    nbytes: int
    kinds: tuple[str, ...] = ()
    places: tuple[tuple[str, ...], ...] = ()
    memory_nbytes: int | None = None
    own_slots: int = 2
    copy_slots: int = 2
    block_nbytes: int = 1 << 20
    alike_nbytes: int = 0

    def __post_init__(self) -> None:
        ranks = len(self.node_names) * self.ranks_per_node
        if not 1 <= ranks <= MOST_RANKS or self.nbytes < 1:
            raise ConfigError(
                "there is no such job", expected=f"1 to {MOST_RANKS:,} ranks, and at least 1 byte of state on each",
                found=f"{len(self.node_names)} nodes x {self.ranks_per_node} ranks x {self.nbytes} bytes",
            )  # fmt: skip
        if not 0 <= self.alike_nbytes <= self.nbytes:
            raise ConfigError("what all ranks hold alike is part of the state of each",
                              expected=f"at most {self.nbytes} bytes", found=f"{self.alike_nbytes}")  # fmt: skip

    @cached_property
    def topology(self) -> Topology:
        """Ranks in the order of their nodes, as launchers place them by default."""
        nodes = range(len(self.node_names))
        return Topology(tuple(node for node in nodes for _ in range(self.ranks_per_node)), self.node_names)

    @cached_property
    def domains(self) -> dict[str, list[str]]:
        """For each kind of failure domain, innermost first, the name of each node's."""
        return {kind: [place[level] for place in self.places] for level, kind in reversed([*enumerate(self.kinds)])}

    @property
    def state_nbytes(self) -> int:
        """Bytes of state on a node: the B of "4 B"."""
        return self.ranks_per_node * self.nbytes


@dataclasses.dataclass(frozen=True)
class SchemeCosts:
    """What a scheme gives a job.

    Attributes:
        scheme: as it was asked for.
        made: what is made of it over these nodes: "rs:8+2" where groups of ten are made of "rs:6+2".
        memory_nbytes: of the node that needs most.
        spare_nbytes: what must be free there besides when that is allocated.
        fits: whether a node can give both; None: not known.
        survives: what may be lost, in words.
        any_nodes: the most nodes of which any may be lost.
        any_domain: kinds of failure domains of which any one may be lost.
        chances: probability that memory is enough for 1, 2, ... random nodes lost at once.
        too_close: domains that hold more nodes of a group than it may lose.
        uncovered: share of the failures that fall back to the file system; None: failure rates are not known.
        interval_s: from save to save; None also where memory covers no failure.
        waste: share of time, at this interval; None: not known.
    """

    scheme: Scheme
    made: str
    memory_nbytes: int
    spare_nbytes: int
    fits: bool | None
    survives: str
    any_nodes: int
    any_domain: tuple[str, ...]
    chances: tuple[float, ...]
    too_close: tuple[str, ...]
    uncovered: float | None
    interval_s: float | None
    waste: float | None


def consider(job: Job, asked: Sequence[str] = ()) -> tuple[list[tuple[Scheme, Placement]], list[str]]:
    """Place the schemes asked for, or else those of `SCHEMES` that make a difference over so few nodes.

    Returns:
        Schemes and their placements, in order; and why others were left out, a line each.
    """
    found: list[tuple[Scheme, Placement]] = []
    left_out = []
    for text in asked or SCHEMES:
        scheme = parse(text)
        placed = place(job.topology, scheme, job.places)
        same = next((str(known) for known, other in found if _equal(placed, other)), None)
        if asked or same is None:
            found.append((scheme, placed))
        else:
            left_out.append(f"{text} makes {made(placed)} here, as {same} does")
    return found, left_out


def _equal(one: Placement, other: Placement) -> bool:
    coded = one.parity_groups == other.parity_groups and (not one.parity_groups or made(one) == made(other))
    return coded and one.partners == other.partners


def node_nbytes(job: Job, placement: Placement) -> int:
    """Count the bytes that a placement takes in the memory of a node, of the one that needs most.

    Own slots, and those of each copy or parity file that its ranks hold for others, with their headers and tables;
    and the shares of what all ranks hold alike. For the manifest, whose length is that of the names in the state, the
    least is counted, two pages.
    """
    slot = Extents(2 * PAGE_NBYTES, round_up(job.nbytes - job.alike_nbytes, ALIGN_NBYTES), job.block_nbytes)
    sizes = {len(group) for group in placement.parity_groups}
    parity = {n: parity_extents([slot.blocks] * n, placement.scheme.losses, job.block_nbytes).nbytes for n in sizes}
    slot_nbytes, nodes = slot.nbytes, [0] * len(job.node_names)
    for node, owners, group in zip(job.topology.node_of, placement.owners, placement.parity_group_of, strict=True):
        nodes[node] += job.own_slots * slot_nbytes
        nodes[node] += job.copy_slots * (len(owners) * slot_nbytes + parity.get(len(group), 0))
    bounds = cuts(job.alike_nbytes, job.ranks_per_node) if job.alike_nbytes else []
    shares = [Extents(0, high - low, job.block_nbytes).nbytes for low, high in itertools.pairwise(bounds)]
    return max(nodes) + job.own_slots * sum(shares)


def share_uncovered(found: survival.Survival, node_mtbf_s: float, window_s: float) -> float:
    """Probability that a lost node is more than memory can give back, as others are lost while it is replaced.

    Nodes fail independently. The number of further ones within the window follows Poisson; which ones, is random.

    Args:
        found: what may be lost.
        node_mtbf_s: mean time between failures of one node.
        window_s: from a failure until redundancy is whole again.
    """
    mean = (found.nodes - 1) * window_s / node_mtbf_s
    most = min(found.nodes, 1 + _LATER_LOSSES)
    good = found.surviving(most)
    likely = [math.exp(-mean + further * math.log(mean) - math.lgamma(further + 1)) if mean else float(not further)
              for further in range(most)]  # fmt: skip
    lost = [1 - good[1 + further] / math.comb(found.nodes, 1 + further) for further in range(most)]
    beyond = max(0.0, 1 - math.fsum(likely))
    # Below this it is the rounding of the sum, and not a probability.
    return min(1.0, math.fsum(p * share for p, share in zip(likely, lost, strict=True)) + beyond * (beyond > 1e-12))


def scheme_costs(job: Job, scheme: Scheme, placed: Placement, losses: int, costs: Costs | None) -> SchemeCosts:
    """Work out what a scheme gives a job.

    Args:
        job: nodes, ranks, bytes, failure domains.
        scheme: as asked for.
        placed: over the nodes of the job.
        losses: up to how many nodes lost at once the chances are given for.
        costs: of saves and failures; None: not known.
    """
    found = survival.of(job.topology, placed)
    nodes = found.nodes
    memory = node_nbytes(job, placed)
    good = found.surviving(losses)
    uncovered = interval = wasted = None
    if costs is not None:
        uncovered = share_uncovered(found, costs.mtbf_s * nodes, costs.restart_s)
        interval = best_interval(costs, uncovered)
        wasted = None if interval is None and costs.drain_every_s is None else waste(interval, costs, uncovered)
    return SchemeCosts(
        scheme=scheme,
        made=made(placed),
        memory_nbytes=memory,
        spare_nbytes=headroom(memory),
        fits=None if job.memory_nbytes is None else memory + headroom(memory) <= job.memory_nbytes,
        survives=survival.describe(found, job.domains),
        any_nodes=found.any_nodes,
        any_domain=tuple(kind for kind, names in job.domains.items() if survival.any_domain(found, names)),
        chances=tuple(good[lost] / math.comb(nodes, lost) for lost in range(1, losses + 1)),
        too_close=tuple(survival.too_close(job.topology, placed, job.domains)),
        uncovered=uncovered,
        interval_s=interval,
        waste=wasted,
    )


def least(prospects: Sequence[SchemeCosts]) -> dict[str, SchemeCosts]:
    """Find the prospect of the least memory for each thing that may be lost, among those that fit.

    Returns:
        By "any 1 node", "any 2 nodes", ... and by "any 1 rack".
    """
    fitting = [p for p in prospects if p.fits is not False]
    # Of two that differ by a few headers only, the one that survives more.
    fitting.sort(key=lambda p: (float(f"{p.memory_nbytes:.3g}"), -p.any_nodes))
    wishes = {f"any {many(n, 'node')}": [p for p in fitting if p.any_nodes >= n] for n in (1, 2, 3)}
    for kind in dict.fromkeys(kind for p in fitting for kind in p.any_domain):
        wishes[f"any 1 {kind}"] = [p for p in fitting if kind in p.any_domain]
    return {wish: those[0] for wish, those in wishes.items() if those}
