"""How often to save: Young's and Daly's intervals, and the share of time that saves and failures cost.

docs/plan.md has the model, its assumptions and a worked example. All times are wall-clock seconds. An interval is the
time from one call of ``save`` to the next.
"""

from __future__ import annotations

import dataclasses
import math


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
