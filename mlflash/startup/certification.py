"""Which attempts are held in memory besides the newest, and when one of them is certified. Pure: alike on all ranks.

A step is certified when its own values passed their checks, training went on from it for so many steps, and nothing
that was saved meanwhile was suspect. One is tried at a time, so that memory has to hold it, the one that is certified,
and the newest.
"""

from __future__ import annotations

import dataclasses

from ..memory.slot_header import Attempt


@dataclasses.dataclass(frozen=True)
class Saved:
    """An attempt, and its step."""

    attempt: Attempt
    step: int


class Certification:
    """What is known of the attempts that memory holds.

    Args:
        after: steps that training has to go on for; 0: nothing is certified.
        keeps: whether a step that is suspect is given up rather than the one before it.

    Attributes:
        certified: the newest that is; None: there is none.
        held: the attempts that no save may write over.
    """

    def __init__(self, after: int, keeps: bool):
        self._after, self._keeps = after, keeps
        self.certified: Saved | None = None
        self._newest: Saved | None = None
        self._good: Saved | None = None  # the newest that is not suspect
        self._tried: Saved | None = None
        self.held: frozenset[Attempt] = frozenset()

    def certified_attempt(self) -> Attempt | None:
        """The attempt of the newest that is certified; None: there is none."""
        return None if self.certified is None else self.certified.attempt

    @property
    def has_better(self) -> bool:
        """Whether a step that is suspect is given up, as there is a good one."""
        return self._keeps and self._good is not None

    def restored(self, saved: Saved, is_suspect: bool) -> None:
        """Hear what was restored: training goes on from it."""
        self._good = None if is_suspect else saved
        self._newest, self._tried = saved, None
        self._hold()

    def committed(self, saved: Saved, is_suspect: bool) -> Saved | None:
        """Hear what was committed; gives what may be certified now, when all of its values were looked at."""
        if is_suspect:
            self._tried = None
            self._newest = self._good if self.has_better else saved
            self._hold()
            return None
        if self._after and self._tried is None and self._newest is not None and self._newest == self._good:
            self._tried = self._newest
        self._newest = self._good = saved
        self._hold()
        due = self._tried is not None and saved.step - self._tried.step >= self._after
        return self._tried if due else None

    def tried(self, is_good: bool) -> None:
        """Hear what all of the values of the one that was tried say."""
        if is_good:
            self.certified = self._tried
        self._tried = None
        self._hold()

    def mark(self, attempts: frozenset[Attempt], is_good: bool) -> None:
        """Hear what somebody says of some attempts."""
        if is_good:
            known = (self._newest, self._good, self._tried)
            self.certified = next((one for one in known if one and one.attempt in attempts), self.certified)
        else:
            self._good, self._tried, self.certified = (
                None if one is None or one.attempt in attempts else one
                for one in (self._good, self._tried, self.certified)
            )
        self._hold()

    def _hold(self) -> None:
        every = (self._newest, self._tried, self.certified)
        self.held = frozenset(saved.attempt for saved in every if saved is not None)
