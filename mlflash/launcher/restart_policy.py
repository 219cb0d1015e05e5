"""Whether a job that failed is to be started again, and when. Pure."""

from __future__ import annotations

import dataclasses

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_SAME_STEP = 2  # failures with no newer checkpoint between them, after which there is no hope


@dataclasses.dataclass
class Restarts:
    """The failures so far, and what follows from them.

    Args:
        most: restarts that are allowed.
    """

    most: int
    done: int = 0
    goes_back: bool = False
    """Whether the next start takes the newest certified step, and not the newest of all."""
    _newest: int | None = None  # newest checkpoint when it failed last
    _left: int | None = None  # the newest checkpoint when it was left for the certified one
    _back_to: int | None = None  # the certified step that it went back to last
    _since: int = 0  # failures since that one was committed
    _in_vain: int = 0  # of these, those at which no node was lost

    def after_failure(self, newest: int | None, node_lost: bool, certified: int | None = None,
                      is_suspect: bool = False) -> str:  # fmt: skip
        """Say why there is to be no further restart; "" where there is to be one.

        What failed decides where it goes on: after a lost node at the newest step; where the same step failed twice, or
        what was saved last is suspect, at the certified one, once for each that there is.

        Args:
            newest: step of the newest committed checkpoint; None: there is none, or nothing is known.
            node_lost: whether a node was lost: that is no fault of the training.
            certified: the newest certified step; None: there is none, or nothing is known.
            is_suspect: whether the values that were saved last are.
        """
        if self.goes_back and newest in (self._left, self._back_to):  # nothing was saved since
            newest = self._back_to
        else:
            self.goes_back, self._left = False, None
        if newest is not None and (self._newest is None or newest > self._newest):
            self._newest, self._since, self._in_vain = newest, 0, 0
        self._since += 1
        self._in_vain += not node_lost
        if self.done >= self.most:
            return f"{self.done} of {self.most} restarts are used up"
        can_go_back = certified is not None and certified not in (self._back_to, newest) and not node_lost
        if can_go_back and (is_suspect or self._in_vain >= _SAME_STEP):
            self.goes_back, self._left, self._back_to = True, newest, certified
            self._newest, self._since, self._in_vain = certified, 1, 0
        if self._in_vain >= _SAME_STEP:
            where = "before the first checkpoint" if self._newest is None else f"after step {self._newest}"
            return f"it failed {self._in_vain} times {where} without a newer checkpoint"
        self.done += 1
        return ""

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next start: twice as long after each failure without a newer checkpoint."""
        return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (self._since - 2)) if self._since > 1 else 0.0
