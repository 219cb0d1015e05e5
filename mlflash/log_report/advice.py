"""How often to save, from measured times: the intervals of Young and Daly, see `planning.interval`."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence

from ..planning.interval import Costs, best_interval, waste, young
from .failures import Failure
from .launches import Launch
from .log_statistics import Spread
from .recoveries import Recovery

NODE_MTBF_S = 264 * 86400.0
"""Assumed time between failures of one node, from the training of Llama 3, see docs/plan.md."""
_RESTART_S = 120.0  # assumed if none was measured; the default of `mlflash plan`
_LONG_S = 86_400.0  # a log of this length allows an estimate of the failure rate, with any number of failures
_SHORT_S, _MANY = 3600.0, 5  # a log of this length does if it has at least this many failures


@dataclasses.dataclass(frozen=True)
class Advice:
    """How often to save.

    Attributes:
        costs: what saves and failures cost. The values are measured unless they are marked as assumed.
        failures: the number of failures behind the time between failures; 0: that time is assumed.
        node_mtbf_s: the assumed time between failures of one node; 0: it was measured.
        is_given: whether the user gave that time.
        restart_measured: whether ``costs.restart_s`` was measured.
        best_s, young_s: the interval from save to save that wastes least (Daly's), and Young's. None: no save was
            measured.
        now_s: the median interval in the log. None: there were fewer than two saves.
        step_s: the median time of a step. None as above.
        best_waste, now_waste: the share of time that each interval costs in the long run.
    """

    costs: Costs
    failures: int
    node_mtbf_s: float
    is_given: bool
    restart_measured: bool
    best_s: float | None
    young_s: float | None
    now_s: float | None
    step_s: float | None
    best_waste: float | None
    now_waste: float | None

    @property
    def best_steps(self) -> int | None:
        """The best interval in steps, at least 1."""
        return None if self.best_s is None or not self.step_s else max(1, round(self.best_s / self.step_s))


def advise(launches: Sequence[Launch], failures: Sequence[Failure], in_place: Sequence[Recovery], wall_s: float,
           stall: Spread, commit: Spread, node_mtbf_s: float | None) -> Advice:  # fmt: skip
    """Suggest an interval from the measured times.

    Args:
        launches, failures, in_place: the history. A rank that was replaced in place counts as a failure here, too.
        wall_s: seconds from the first event to the last.
        stall, commit: times of a save on the slowest rank, in seconds.
        node_mtbf_s: mean time between failures of one node. None: as measured, or `NODE_MTBF_S` without failures.
    """
    nodes = max(1, len(launches[-1].nodes))
    failed = len(failures) + len(in_place)
    measured = failed > 0 and node_mtbf_s is None and says_much(wall_s, failed)
    assumed_s = node_mtbf_s or NODE_MTBF_S
    recoveries = [one.down_s + one.recovery_s for one in failures if one.went_on]
    recoveries += [one.line.seconds for one in in_place]
    costs = Costs(
        wall_s / failed if measured else assumed_s / nodes,
        stall.mean,
        max(commit.mean, stall.mean),
        statistics.fmean(recoveries) if recoveries else _RESTART_S,
    )
    best_s = best_interval(costs, 0.0) if stall.count else None
    now_s, step_s = _pace(launches)
    return Advice(
        costs,
        failed if measured else 0,
        0.0 if measured else assumed_s,
        node_mtbf_s is not None,
        bool(recoveries),
        best_s,
        None if best_s is None else young(costs.stall_s, costs.mtbf_s),
        now_s,
        step_s,
        waste(best_s, costs, 0.0) if best_s else None,
        waste(now_s, costs, 0.0) if now_s else None,
    )


def says_much(wall_s: float, failed: int) -> bool:
    """Say whether this number of failures in this time allows an estimate of the failure rate. Not collective."""
    return wall_s >= _LONG_S or (wall_s >= _SHORT_S and failed >= _MANY)


def _pace(launches: Sequence[Launch]) -> tuple[float | None, float | None]:
    """Return the median time from save to save and the median time of a step, in seconds."""
    intervals, steps = [], []
    for stretch in (stretch for launch in launches for stretch in launch.stretches):
        saves = list(stretch.saves.values())
        for before, after in itertools.pairwise(saves):
            if after.step > before.step and after.began > before.began:
                intervals.append(after.began - before.began)
                steps.append((after.began - before.began) / (after.step - before.step))
    return (statistics.median(intervals), statistics.median(steps)) if intervals else (None, None)
