"""The values of saves: what is suspect, which steps are certified; and which attempts memory holds."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ..errors import CorruptSlot
from ..memory.slot import Attempt, Slot, Verdict
from ..protect.deduplication import Plan
from ..protect.value_checks import Examination, Finding, Stored, in_words
from ..state.layout import Extents, Layout

if TYPE_CHECKING:
    from .courier_state import CourierState

log = logging.getLogger("mlflash")


@dataclasses.dataclass(frozen=True)
class Saved:
    """An attempt and its step."""

    attempt: Attempt
    step: int


class Certification:
    """Decides which attempts memory holds besides the newest, and when one is certified. Pure, alike on all ranks.

    A step is certified when its own values passed their checks, training went on from it for enough steps, and nothing
    saved in between was suspect. One step is on trial at a time. So memory must hold this one, the certified one, and
    the newest. ``keeps``: a suspect step is dropped, not the one before. ``history``: how many more it holds, of those
    that were committed before the newest and are to be kept; ``on_disk``: where these are, and not in memory.
    """

    def __init__(self, after: int, keeps: bool, history: int = 0, on_disk: bool = False):
        self._after, self._keeps, self._is_on_disk = after, keeps, on_disk
        self._history: collections.deque[Saved] = collections.deque(maxlen=history)  # before the newest
        self._is_kept = False  # whether the newest is to be kept, too
        self.certified: Saved | None = None  # the newest certified attempt; None if there is none
        self._newest: Saved | None = None
        self._good: Saved | None = None  # the newest that is not suspect
        self._tried: Saved | None = None
        self.held: frozenset[Attempt] = frozenset()  # the attempts that no save may overwrite

    def found(self, earlier: Sequence[Saved]) -> None:
        """Note what earlier runs have committed, the newest first, if older steps are held."""
        if self._history.maxlen and earlier:
            first = 0 if self._is_on_disk else 1  # memory may have a newer one than the disks
            if first:
                self._newest, self._is_kept = earlier[0], True
            self._history.extend(reversed(earlier[first : first + self._history.maxlen]))
            self._hold()

    def older(self) -> frozenset[Attempt]:
        """The attempts that are held whatever is saved or restored next."""
        newest = self._newest if self._is_kept else None
        return frozenset(saved.attempt for saved in (self.certified, *self._history, newest) if saved is not None)

    def history(self) -> frozenset[Attempt]:
        """Those that nothing but the history holds."""
        others = (self.certified, self._newest, self._tried)
        return frozenset(saved.attempt for saved in self._history if saved not in others)

    @property
    def has_better(self) -> bool:
        """Whether a suspect step is dropped, because there is a good one."""
        return self._keeps and self._good is not None

    def restored(self, saved: Saved, is_suspect: bool) -> None:
        """Note the step that was restored. Training goes on from it."""
        self._good = None if is_suspect else saved
        is_known = saved in self._history or (saved == self._newest and self._is_kept)
        is_kept = bool(self._history.maxlen) and (is_known or not self._is_on_disk)
        if self._newest is not None and saved.step > self._newest.step:
            self._advance(saved, is_kept)
        else:
            self._newest, self._is_kept = saved, is_kept
        self._tried = None
        self._hold()

    def committed(self, saved: Saved, is_suspect: bool, is_kept: bool) -> Saved | None:
        """Note a commit. Return the attempt that may be certified now, if all its values pass a check.

        ``is_kept``: whether it is to be kept when there are newer ones.
        """
        if is_suspect:
            self._tried = None
            if self.has_better:
                self._newest = self._good
            else:
                self._advance(saved, is_kept)
            self._hold()
            return None
        if self._after and self._tried is None and self._newest is not None and self._newest == self._good:
            self._tried = self._newest
        self._advance(saved, is_kept)
        self._good = saved
        self._hold()
        due = self._tried is not None and saved.step - self._tried.step >= self._after
        return self._tried if due else None

    def keep(self, saved: Saved) -> None:
        """Note that the newest step is on disks, whole."""
        self._newest = self._newest or saved
        self._is_kept = self._is_kept or self._newest == saved
        self._hold()

    def _advance(self, saved: Saved, is_kept: bool) -> None:
        """Make an attempt the newest one, before which is what training continued from."""
        if self._newest is not None and self._is_kept and self._newest not in self._history:
            self._history.append(self._newest)
        while self._history and self._history[-1].step >= saved.step:  # training went back behind it
            self._history.pop()
        self._newest, self._is_kept = saved, is_kept

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
        every = (self._newest, self._tried)
        self.held = self.older().union(saved.attempt for saved in every if saved is not None)


# Checks of values: some of them while the checksums of a save are made, and all before a step is certified


class ValueChecks:
    """The value checks of one save on this rank."""

    def __init__(self, state: CourierState, generation: int):
        self._examiner, self._generation = state.examiner, generation
        self._examinations: list[Examination] = []

    def of_slot(self, plan: Plan, slot: Slot) -> Callable[[int], None]:
        """Return a function that is told up to which block the slot has checksums."""
        layout = plan.layout
        return self._begin(slot, layout.extents, (layout, "slot"), functools.partial(_in_slot, layout))

    def of_share(self, plan: Plan, share: Slot) -> Callable[[int], None]:
        """The same for this rank's share of what several ranks hold alike."""
        return self._begin(share, plan.share_extents, (plan.layout, "share"), functools.partial(_in_share, plan))

    def _begin(self, slot: Slot, extents: Extents | None, key: object, stored: Callable[[], Iterator[Stored]]
               ) -> Callable[[int], None]:  # fmt: skip
        if not self._examiner.is_on or extents is None:
            return lambda block: None
        self._examinations.append(self._examiner.begin(slot, extents, key, stored, self._generation))
        return self._examinations[-1].examine

    @property
    def findings(self) -> list[Finding]:
        return [finding for examination in self._examinations for finding in examination.findings]


def report_suspect(state: CourierState, step: int, findings: Sequence[Finding]) -> None:
    """Let the recorder report what is suspect on this rank, if anything is."""
    if findings:
        state.recorder.suspect(step, in_words(findings), len({finding.tensor for finding in findings}))


def certify(state: CourierState, due: Saved) -> bool:
    """Check all values of an attempt that training continued from, and certify it. Collective over the world."""
    findings = _findings_in_all(state, due)
    differed = state.replicas is not None and state.replicas.differed_at == due.step
    is_good, is_suspect = findings == [] and not differed, bool(findings) or differed
    agreed = state.world.agree(all_of={"good": is_good}, any_of={"suspect": is_suspect})
    if agreed.good or agreed.suspect:
        for slot in state.pool.holding(due.attempt):
            slot.record_verdict(due.attempt, Verdict.CERTIFIED if agreed.good else Verdict.SUSPECT)
    state.certification.tried(agreed.good)
    if agreed.good:
        state.recorder.certified(due.step)
    state.pool.hold_only(state.certification.held)
    return bool(agreed.good)


def _findings_in_all(state: CourierState, due: Saved) -> list[Finding] | None:
    own = next((slot for slot in state.pool.holding(due.attempt) if slot in state.pool.own), None)
    if own is None or own.header is None:
        return None
    try:
        entries = own.manifest().entries
    except CorruptSlot as error:  # the scrubber or a restore reports the details
        log.warning("step %d is not certified because rank %d cannot read it: %s", due.step, state.world.rank, error)
        return None
    extents = own.header.extents
    stored = [Stored(entry, entry.start, entry.nbytes) for entry in entries if entry.start < extents.payload_nbytes]
    findings = state.examiner.examine_all(own, extents, stored)
    report_suspect(state, due.step, findings)
    return findings


def _in_slot(layout: Layout) -> Iterator[Stored]:
    return (Stored(entry, entry.start, entry.nbytes) for entry in layout.entries if not layout.is_shared(entry))


def _in_share(plan: Plan) -> Iterator[Stored]:
    assert plan.sharing is not None
    for piece in plan.pieces:
        if piece.share == plan.sharing.share:
            yield Stored(plan.layout.entries[piece.leaf], piece.at, piece.end - piece.start)
