"""How often to save: Young's and Daly's intervals, and the share of time that saves and failures cost.

docs/plan.md has the model, its assumptions and a worked example. All times are wall-clock seconds. An interval is the
time from one call of ``save`` to the next.
"""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Costs:
    """What saves and failures of a job cost.

    Attributes:
        mtbf_s: mean time between failures of the job: that of one node divided by the number of nodes.
        stall_s: time that a save stalls training.
        commit_s: time from the call of ``save`` to its commit. A failure before it goes back to the previous save.
        restart_s: time from a failure to the next step after a restore from memory.
        drain_every_s: time between two drains to the file system. None: unknown.
        pfs_restart_s: as ``restart_s``, with a restore from the file system.
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

    Daly counts the computation between two saves. The interval here includes the save.

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
    """Return the time of a job divided by the time of its computation alone, for random failures (Poisson).

    Args:
        recovery_s: time that each failure costs beyond the work since the last save. Failures may happen during it.

    Source: Daly 2006, the complete model, with failures during restarts and repeated work.
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
    """Return the interval that wastes least. None if memory covers no failure: saves then only serve to drain.

    It is Daly's interval, whatever share of failures goes back to the file system, because drains take the newest save,
    too. It is never shorter than a commit, because saves would then wait for each other.

    Args:
        costs: what saves and failures cost.
        uncovered: share of the failures that go back to the file system.
    """
    return None if uncovered >= 1 else max(daly(costs.stall_s, costs.mtbf_s), costs.commit_s)


def waste(interval_s: float | None, costs: Costs, uncovered: float) -> float:
    """Return the share of time that does not compute a step for the first time: saves, recoveries and lost work.

    To first order it is ``C/T + (T/2 + L + R)/M + u (D/2 + P - R)/M``. This function uses the complete model of memory,
    and of the file system around it. If ``drain_every_s`` is unknown, failures that go back to the file system cost
    nothing.

    Args:
        interval_s: T. None: the job saves only what it drains.
        costs: C, L, R, D, P (stall, commit, restart, drain, restart from the file system) and M (time between
            failures).
        uncovered: u, share of the failures that go back to the file system.
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
