"""How often to save: Young's and Daly's intervals, and the share of time that saves and failures cost.

The model, its assumptions and a worked example are in docs/plan.md. All times are in seconds of wall clock; an interval
goes from one call of ``save`` to the next.
"""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Costs:
    """What saves and failures of a job cost.

    Attributes:
        mtbf_s: mean time between failures of the whole job: that of a node over the number of nodes.
        stall_s: how long a save keeps training waiting.
        commit_s: from the call of ``save`` to its commit; a failure before that falls back to the save before.
        restart_s: from a failure to the first new step, restored from memory.
        drain_every_s: from one drain to the file system to the next; None: it is not known.
        pfs_restart_s: as ``restart_s``, but restored from the file system.
    """

    mtbf_s: float
    stall_s: float
    commit_s: float
    restart_s: float
    drain_every_s: float | None = None
    pfs_restart_s: float = 0.0


def young(stall_s: float, mtbf_s: float) -> float:
    """Estimate the best interval to first order.

    Example:
        A save of 2 s and a failure every 10,000 s → 200 s.

    Source: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
    """
    return math.sqrt(2 * stall_s * mtbf_s)


def daly(stall_s: float, mtbf_s: float) -> float:
    """Estimate the best interval to higher order.

    Daly counts the time of computation between two saves; the interval has the save in it.

    Example:
        A save of 5 min and a failure every 6 h → 56.7 min of computation, an interval of 61.7 min.

    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
        Generation Computer Systems 22(3), 2006.
    """
    if stall_s >= 2 * mtbf_s:
        return mtbf_s + stall_s
    share = stall_s / (2 * mtbf_s)
    return young(stall_s, mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9)


def inflation(interval_s: float, stall_s: float, recovery_s: float, mtbf_s: float) -> float:
    """How many times as long a job takes as its computation alone, where failures come at random (Poisson).

    Args:
        recovery_s: lost with each failure, over what was computed since the last save; failures may fall into it.

    Source: Daly 2006, the complete model: failures also while restarting and while computing again.
    """
    if interval_s <= stall_s:
        return math.inf
    failures = interval_s / mtbf_s
    try:
        again = math.expm1(failures) / failures if failures else 1.0
        return interval_s / (interval_s - stall_s) * math.exp(recovery_s / mtbf_s) * again
    except OverflowError:  # a failure interrupts every attempt
        return math.inf


def best_interval(costs: Costs, uncovered: float) -> float | None:
    """Give the interval that wastes least; None where memory covers no failure: saves then help only to drain.

    It is Daly's, whatever share falls back to the file system, since that too gets the newest save; but no shorter
    than a commit, as saves would wait for each other.

    Args:
        costs: of the job.
        uncovered: share of the failures that fall back to the file system.
    """
    return None if uncovered >= 1 else max(daly(costs.stall_s, costs.mtbf_s), costs.commit_s)


def waste(interval_s: float | None, costs: Costs, uncovered: float) -> float:
    """Share of the time that is not spent on computing a step for the first time: saves, recoveries, lost work.

    To first order ``C/T + (T/2 + L + R)/M + u (D/2 + P - R)/M``; here it is the complete model, of memory and, around
    it, of the file system. What falls back to the file system costs nothing where ``drain_every_s`` is not known.

    Args:
        interval_s: T; None: saved is only what is drained.
        costs: C, L, R, D, P: stall, commit, restart, drain, restart from the file system; M: time between failures.
        uncovered: u, share of the failures that fall back to the file system.
    """
    longer = 1.0
    if interval_s is not None and uncovered < 1:
        # A failure loses what came after the save of the last commit; a stall among that is not repeated.
        lost_s = costs.commit_s - costs.stall_s + costs.restart_s
        longer = inflation(interval_s, costs.stall_s, lost_s, costs.mtbf_s / (1 - uncovered))
    if costs.drain_every_s is not None and uncovered > 0:
        stall_s, age_s = (costs.stall_s, 0.0) if interval_s is None else (0.0, interval_s / 2)
        lost_s = age_s + costs.commit_s - stall_s + costs.pfs_restart_s
        longer *= inflation(costs.drain_every_s, stall_s, lost_s, costs.mtbf_s / uncovered)
    return 1 - 1 / longer
