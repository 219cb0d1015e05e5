"""Decides whether and when a job that failed is started again. Pure."""

from __future__ import annotations

import dataclasses

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_SAME_STEP = 2  # failures without a newer checkpoint between them, after which the job is not started again


@dataclasses.dataclass
class Restarts:
    """The failures so far, and what follows from them.

    Args:
        most: number of restarts that are allowed.
    """

    most: int
    done: int = 0
    goes_back: bool = False
    """Whether the next start takes the newest certified step, and not the newest step."""
    _newest: int | None = None  # newest checkpoint at the last failure
    _left: int | None = None  # the newest checkpoint when the job went back to the certified one
    _back_to: int | None = None  # the certified step that it went back to last
    _since: int = 0  # failures since the newest checkpoint was committed
    _in_vain: int = 0  # those of them without a lost node

    def after_failure(self, newest: int | None, node_lost: bool, certified: int | None = None,
                      is_suspect: bool = False) -> str:  # fmt: skip
        """Say why there is no further restart; "" if there is one.

        The kind of failure decides where the next start goes on. After a lost node that is the newest step. If the same
        step failed twice, or the values of the last save are suspect, it is the certified step, once for each certified
        step.

        Args:
            newest: step of the newest committed checkpoint; None if there is none, or if it is unknown.
            node_lost: whether a node was lost. Then the training is not to blame.
            certified: the newest certified step; None if there is none, or if it is unknown.
            is_suspect: whether the values of the last save are suspect.
        """
        if self.goes_back and newest in (self._left, self._back_to):  # nothing was saved since then
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
