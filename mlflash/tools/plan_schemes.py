"""What each redundancy scheme would give a job: its memory, the losses it survives, and how often to save.

Nothing follows from the name of a scheme. Each scheme is placed over the nodes as a Checkpointer places it, and the
losses that the placement survives are counted. docs/plan.md has the model of the interval, its assumptions and a worked
example. All times are wall-clock seconds. An interval is the time from one call of ``save`` to the next.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from functools import cached_property

from ..errors import ConfigError
from ..memory.memory_limits import headroom
from ..memory.parity_layout import parity_extents
from ..placement import survival
from ..placement.redundancy import Placement, Scheme, made, parse, place
from ..placement.topology import Topology
from ..protect.deduplication import cuts
from ..state import layout
from ..state.layout import ALIGN_NBYTES, PAGE_NBYTES, Extents, round_up
from ..text import YEAR_S, many

SCHEMES = ("none", "copy", "copy:2", "xor:4", "xor:8", "rs:6+2", "rs:8+2", "rs:8+3")
MOST_RANKS = 1 << 20
_LATER_LOSSES = 64  # further nodes lost during one recovery; more of them count as not covered


# How often to save


@dataclasses.dataclass(frozen=True)
class Costs:
    """What saves and failures of a job cost."""

    mtbf_s: float  # mean time between failures of the job: that of one node divided by the number of nodes
    stall_s: float  # time that a save stalls training
    commit_s: float  # time from the call of ``save`` to its commit; a failure before it goes back to the previous save
    restart_s: float  # time from a failure to the next step after a restore from memory
    drain_every_s: float | None = None  # time between two drains to the file system; None: unknown
    pfs_restart_s: float = 0.0  # as ``restart_s``, with a restore from the file system


def young(stall_s: float, mtbf_s: float) -> float:
    """Estimate the best interval to first order. A save of 2 s and a failure every 10,000 s give 200 s.

    Source: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
    """
    return math.sqrt(2 * stall_s * mtbf_s)


def daly(stall_s: float, mtbf_s: float) -> float:
    """Estimate the best interval to higher order. Daly counts the computation alone; this interval includes the save.

    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
        Generation Computer Systems 22(3), 2006.
    """
    if stall_s >= 2 * mtbf_s:
        return mtbf_s + stall_s
    share = stall_s / (2 * mtbf_s)
    return young(stall_s, mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9)


def inflation(interval_s: float, stall_s: float, recovery_s: float, mtbf_s: float) -> float:
    """Return the time of a job divided by the time of its computation alone, for random failures (Poisson).

    Each failure costs ``recovery_s`` beyond the work since the last save. Failures may happen during it.

    Source: Daly 2006, the complete model, with failures during restarts and repeated work.
    """
    if interval_s <= stall_s:
        return math.inf
    failures = interval_s / mtbf_s
    try:
        repeated = math.expm1(failures) / failures if failures else 1.0
        return interval_s / (interval_s - stall_s) * math.exp(recovery_s / mtbf_s) * repeated
    except OverflowError:  # a failure interrupts every attempt
        return math.inf


def best_interval(costs: Costs, uncovered: float) -> float | None:
    """Return Daly's interval, or the time of a commit if that is longer: saves would wait for each other.

    The share ``uncovered`` of failures that go back to the file system does not change it, because drains take the
    newest save, too. If memory covers no failure, saves only serve to drain, and the result is None.
    """
    return None if uncovered >= 1 else max(daly(costs.stall_s, costs.mtbf_s), costs.commit_s)


def waste(interval_s: float | None, costs: Costs, uncovered: float) -> float:
    """Return the share of time that does not compute a step for the first time: saves, recoveries and lost work.

    ``uncovered`` is the share of the failures that go back to the file system. They cost nothing if
    ``costs.drain_every_s`` is unknown. Without an interval, the job saves only what it drains.
    """
    longer = 1.0
    if interval_s is not None and uncovered < 1:
        # A failure loses what came after the last committed save. The stall of that save is not repeated.
        lost_s = costs.commit_s - costs.stall_s + costs.restart_s
        longer = inflation(interval_s, costs.stall_s, lost_s, costs.mtbf_s / (1 - uncovered))
    if costs.drain_every_s is not None and uncovered > 0:
        stall_s, age_s = (costs.stall_s, 0.0) if interval_s is None else (0.0, interval_s / 2)
        lost_s = age_s + costs.commit_s - stall_s + costs.pfs_restart_s
        longer *= inflation(costs.drain_every_s, stall_s, lost_s, costs.mtbf_s / uncovered)
    return 1 - 1 / longer


# Schemes


@dataclasses.dataclass(frozen=True)
class Job:
    """A job to plan for."""

    node_names: tuple[str, ...]
    ranks_per_node: int
    nbytes: int  # state of a rank
    kinds: tuple[str, ...] = ()  # levels of failure domains, outermost first
    places: tuple[tuple[str, ...], ...] = ()  # the domain of each node at each level; empty: unknown
    memory_nbytes: int | None = None  # of a node, for checkpoints; None: unknown
    own_slots: int = 2  # of each rank: a third if the job drains, and one or two more if it certifies steps
    copy_slots: int = 2  # of each copy and each parity file: as many more if the job certifies steps
    alike_nbytes: int = 0  # the part of ``nbytes`` that is the same on all ranks: stored once on each node

    def __post_init__(self) -> None:
        if not 1 <= len(self.node_names) * self.ranks_per_node <= MOST_RANKS or self.nbytes < 1:
            raise ConfigError(
                "impossible job size", expected=f"1 to {MOST_RANKS:,} ranks, and at least 1 byte of state on each",
                found=f"{len(self.node_names)} nodes x {self.ranks_per_node} ranks x {self.nbytes} bytes",
            )  # fmt: skip
        if not 0 <= self.alike_nbytes <= self.nbytes:
            raise ConfigError("the state that all ranks share (--alike) is larger than the state of a rank",
                              expected=f"at most {self.nbytes} bytes", found=f"{self.alike_nbytes}")  # fmt: skip

    @cached_property
    def topology(self) -> Topology:
        """Ranks in the order of their nodes, as launchers place them by default."""
        nodes = range(len(self.node_names))
        return Topology(tuple(node for node in nodes for _ in range(self.ranks_per_node)), self.node_names)

    @cached_property
    def domains(self) -> dict[str, list[str]]:
        """The domain name of each node, for each kind of failure domain, innermost first."""
        return {kind: [place[level] for place in self.places] for level, kind in reversed([*enumerate(self.kinds)])}

    @property
    def state_nbytes(self) -> int:
        """Bytes of state on a node (the B of "4 B")."""
        return self.ranks_per_node * self.nbytes


@dataclasses.dataclass(frozen=True)
class SchemeCosts:
    """What a scheme gives a job. What depends on failure rates is None if these are unknown."""

    scheme: str  # as the user named it
    made: str  # on these nodes: "rs:8+2" if "rs:6+2" forms groups of ten
    memory_nbytes: int  # on the node that needs most
    memory_per_state: float  # ``memory_nbytes`` divided by the state of a node
    spare_nbytes: int  # what must stay free when the memory is allocated
    fits: bool | None  # whether a node has room for both; None: unknown
    survives: str  # the losses that it survives, in words
    any_nodes: int  # largest k for which any k nodes may be lost
    any_domain: tuple[str, ...]  # kinds of failure domains for which any one domain may be lost
    chances: dict[int, float]  # number of random nodes lost at once → probability that a checkpoint is left in memory
    warnings: tuple[str, ...]  # domains that hold more nodes of a group than the group may lose
    uncovered: float | None  # share of the failures that go back to the file system
    falls_per_year: float | None  # number of these failures
    interval_s: float | None  # best time from save to save; None, too, if memory covers no failure
    waste: float | None  # share of wasted time with this interval


def consider(job: Job, asked: Sequence[str] = ()) -> tuple[list[tuple[Scheme, Placement]], list[str]]:
    """Place the named schemes, or else those of `SCHEMES` that differ here, and say why others are left out."""
    considered: list[tuple[Scheme, Placement]] = []
    left_out = []
    for scheme in map(parse, asked or SCHEMES):
        placed = place(job.topology, scheme, job.places)
        same = next((known for known, other in considered if _groups(other) == _groups(placed)), None)
        if asked or same is None:
            considered.append((scheme, placed))
        else:
            left_out.append(f"{scheme} is left out: it makes {made(placed)} here, as {same} does")
    return considered, left_out


def _groups(placement: Placement) -> tuple[object, ...]:
    return made(placement), placement.parity_groups, placement.partners


def node_nbytes(job: Job, placement: Placement) -> int:
    """Count the bytes that a placement takes in the memory of the node that needs most.

    The manifest counts with its smallest size, two pages; its real size depends on the names in the state.
    """
    slot = Extents(2 * PAGE_NBYTES, round_up(job.nbytes - job.alike_nbytes, ALIGN_NBYTES), layout.BLOCK_NBYTES)
    sizes = {len(group) for group in placement.parity_groups}
    parity = {n: parity_extents([slot.blocks] * n, placement.scheme.losses, layout.BLOCK_NBYTES).nbytes for n in sizes}
    nodes = [0] * len(job.node_names)
    for node, owners, group in zip(job.topology.node_of, placement.owners, placement.parity_group_of, strict=True):
        nodes[node] += job.own_slots * slot.nbytes
        nodes[node] += job.copy_slots * (len(owners) * slot.nbytes + parity.get(len(group), 0))
    bounds = cuts(job.alike_nbytes, job.ranks_per_node) if job.alike_nbytes else []
    shares = [Extents(0, high - low, layout.BLOCK_NBYTES).nbytes for low, high in itertools.pairwise(bounds)]
    return max(nodes) + job.own_slots * sum(shares)


def share_uncovered(survived: survival.Survival, node_mtbf_s: float, window_s: float) -> float:
    """Return the probability that memory cannot cover a lost node, because others are lost while it is replaced.

    Nodes fail independently, so the number of further losses within the window has a Poisson distribution.
    """
    mean = (survived.nodes - 1) * window_s / node_mtbf_s
    most = min(survived.nodes, 1 + _LATER_LOSSES)
    good = survived.surviving(most)
    likely = [math.exp(-mean + further * math.log(mean) - math.lgamma(further + 1)) if mean else float(not further)
              for further in range(most)]  # fmt: skip
    lost = [1 - good[1 + further] / math.comb(survived.nodes, 1 + further) for further in range(most)]
    beyond = max(0.0, 1 - math.fsum(likely))
    # A smaller value is the rounding error of the sum, not a probability.
    return min(1.0, math.fsum(p * share for p, share in zip(likely, lost, strict=True)) + beyond * (beyond > 1e-12))


def scheme_costs(job: Job, scheme: Scheme, placed: Placement, losses: int, costs: Costs | None) -> SchemeCosts:
    """Compute what a scheme gives a job. Without ``costs``, failure rates are unknown."""
    survived = survival.of(job.topology, placed)
    memory, good = node_nbytes(job, placed), survived.surviving(losses)
    uncovered = falls = interval = wasted = None
    if costs is not None:
        uncovered = share_uncovered(survived, costs.mtbf_s * survived.nodes, costs.restart_s)
        falls = uncovered * YEAR_S / costs.mtbf_s
        interval = best_interval(costs, uncovered)
        if interval is not None or costs.drain_every_s is not None:
            wasted = waste(interval, costs, uncovered)
    return SchemeCosts(
        scheme=str(scheme),
        made=made(placed),
        memory_nbytes=memory,
        memory_per_state=memory / job.state_nbytes,
        spare_nbytes=headroom(memory),
        fits=None if job.memory_nbytes is None else memory + headroom(memory) <= job.memory_nbytes,
        survives=survival.describe(survived, job.domains),
        any_nodes=survived.any_nodes,
        any_domain=tuple(kind for kind, names in job.domains.items() if survival.any_domain(survived, names)),
        chances={lost: good[lost] / math.comb(survived.nodes, lost) for lost in range(1, losses + 1)},
        warnings=tuple(survival.too_close(job.topology, placed, job.domains)),
        uncovered=uncovered,
        falls_per_year=falls,
        interval_s=interval,
        waste=wasted,
    )


def least(compared: Sequence[SchemeCosts]) -> dict[str, SchemeCosts]:
    """Find the scheme that fits with the least memory for each loss: "any 1 node", "any 2 nodes", "any 1 rack"."""
    # If two differ only by a few headers, take the one that survives more.
    fitting = sorted((p for p in compared if p.fits is not False),
                     key=lambda p: (float(f"{p.memory_nbytes:.3g}"), -p.any_nodes))  # fmt: skip
    wishes = {f"any {many(n, 'node')}": [p for p in fitting if p.any_nodes >= n] for n in (1, 2, 3)}
    for kind in dict.fromkeys(kind for p in fitting for kind in p.any_domain):
        wishes[f"any 1 {kind}"] = [p for p in fitting if kind in p.any_domain]
    return {wish: granting[0] for wish, granting in wishes.items() if granting}
