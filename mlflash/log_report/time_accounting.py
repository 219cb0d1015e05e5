"""Where the time of a job went: training that was kept, training that was lost, and time without training.

A save counts as kept if a later restore took it or a newer one. Training after it, until the last event of that launch,
is lost. All times are wall-clock seconds.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from .launches import Launch, Stretch


@dataclasses.dataclass
class Account:
    """Where the time went, in seconds. All together are the wall time.

    Attributes:
        kept_s: training whose results were kept.
        stall_s: stalls by saves during that training.
        lost_s: training that was lost, with its saves.
        starting_s: from the start of a launch until its ranks had restored, or until its end if they never did.
        recovering_s: from the known loss of a rank until all ranks trained again, in the processes that stayed.
        down_s: from the last event of a launch to the first event of the next.
    """

    kept_s: float = 0.0
    stall_s: float = 0.0
    lost_s: float = 0.0
    starting_s: float = 0.0
    recovering_s: float = 0.0
    down_s: float = 0.0

    @property
    def wall_s(self) -> float:
        """All of it."""
        return self.kept_s + self.stall_s + self.lost_s + self.starting_s + self.recovering_s + self.down_s

    @property
    def goodput(self) -> float:
        """Share of the wall time in which training made progress that was kept, 0 to 1."""
        return self.share(self.kept_s)

    def share(self, seconds: float) -> float:
        """Return some seconds as a share of the wall time; 0 without wall time."""
        return seconds / self.wall_s if self.wall_s > 0 else 0.0


@dataclasses.dataclass(frozen=True)
class Lost:
    """Training that was lost: from the restored step to the end of its launch."""

    began: float
    ended: float


def account(launches: Sequence[Launch]) -> tuple[Account, list[Lost]]:
    """Return where the time of some launches went, and which training was lost. Launches are ordered by their begin."""
    total, lost = Account(), []
    for before, after in itertools.pairwise(launches):
        total.down_s += max(0.0, after.began - before.last)
    kept = _kept(launches)
    for launch in launches:
        at = launch.began
        for stretch in launch.stretches:
            ready = min(max(at, stretch.ready), stretch.until) if _goes_on(stretch, launches) else stretch.until
            end = min(max(ready, kept[id(stretch)]), stretch.until)
            if stretch.recovered is None:
                total.starting_s += ready - at
            else:
                total.recovering_s += ready - at
            stall_s = sum(save.stall_s for save in stretch.saves.values() if save.ended <= end)
            total.stall_s += min(stall_s, end - ready)
            total.kept_s += max(0.0, end - ready - stall_s)
            total.lost_s += stretch.until - end
            if stretch.until > end:
                lost.append(Lost(end, stretch.until))
            at = stretch.until
    return total, lost


def _goes_on(stretch: Stretch, launches: Sequence[Launch]) -> bool:
    """Say whether a stretch is training. In a first launch it always is; in a later one it has restored or saved."""
    return stretch.trained or any(stretch is one for one in launches[0].stretches)


def _kept(launches: Sequence[Launch]) -> dict[int, float]:
    """Return until when the training of each stretch was kept, by the id of the stretch, in Unix seconds."""
    kept: dict[int, float] = {}
    limit = math.inf  # later restores dropped all earlier steps above this one
    for stretch in [stretch for launch in reversed(launches) for stretch in reversed(launch.stretches)]:
        if not stretch.trained:
            kept[id(stretch)] = stretch.until if limit == math.inf else stretch.ready
            continue
        kept[id(stretch)] = stretch.until if limit == math.inf else _saved_until(stretch, limit)
        limit = min(limit, -math.inf if stretch.from_step is None else stretch.from_step)
    return kept


def _saved_until(stretch: Stretch, limit: float) -> float:
    """Return when the newest step up to a limit was saved."""
    return max((save.ended for save in stretch.saves.values() if save.step <= limit), default=stretch.ready)
