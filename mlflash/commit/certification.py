"""Which steps are certified, and which attempts memory therefore holds in addition to the newest."""

from __future__ import annotations

import dataclasses

from ..memory.slot import Attempt


@dataclasses.dataclass(frozen=True)
class Saved:
    """An attempt and its step."""

    attempt: Attempt
    step: int


class Certification:
    """Decides which attempts memory holds besides the newest, and when one is certified. Pure, alike on all ranks.

    A step is certified when its own values passed their checks, training went on from it for enough steps, and nothing
    saved in between was suspect. One step is on trial at a time. So memory must hold this one, the certified one, and
    the newest. ``keeps``: a suspect step is dropped, not the one before.
    """

    def __init__(self, after: int, keeps: bool):
        self._after, self._keeps = after, keeps
        self.certified: Saved | None = None  # the newest certified attempt; None if there is none
        self._newest: Saved | None = None
        self._good: Saved | None = None  # the newest that is not suspect
        self._tried: Saved | None = None
        self.held: frozenset[Attempt] = frozenset()  # the attempts that no save may overwrite

    def certified_attempt(self) -> Attempt | None:
        return None if self.certified is None else self.certified.attempt

    @property
    def has_better(self) -> bool:
        """Whether a suspect step is dropped, because there is a good one."""
        return self._keeps and self._good is not None

    def restored(self, saved: Saved, is_suspect: bool) -> None:
        """Note the step that was restored. Training goes on from it."""
        self._good = None if is_suspect else saved
        self._newest, self._tried = saved, None
        self._hold()

    def committed(self, saved: Saved, is_suspect: bool) -> Saved | None:
        """Note a commit. Return the attempt that may be certified now, if all its values pass a check."""
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
        if is_good:
            self.certified = self._tried
        self._tried = None
        self._hold()

    def mark(self, attempts: frozenset[Attempt], is_good: bool) -> None:
        if is_good:
            known = (self._newest, self._good, self._tried)
            self.certified = next((saved for saved in known if saved and saved.attempt in attempts), self.certified)
        else:
            self._good, self._tried, self.certified = (
                None if saved is None or saved.attempt in attempts else saved
                for saved in (self._good, self._tried, self.certified)
            )
        self._hold()

    def _hold(self) -> None:
        every = (self._newest, self._tried, self.certified)
        self.held = frozenset(saved.attempt for saved in every if saved is not None)
