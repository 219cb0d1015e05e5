"""A save's slot and share → what is suspect in their values, checked while their checksums are made."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence

from ..errors import CorruptSlot
from ..memory.slot import Slot
from ..memory.slot_header import Verdict
from ..redundancy.slot_plan import Plan
from ..startup.certification import Saved
from ..startup.context import Context
from ..state.layout import Extents, Layout
from ..value_checks.checked_parts import Stored
from ..value_checks.examiner import Examination, Finding, in_words

log = logging.getLogger("mlflash")


class ValueLooks:
    """The value checks of one save on this rank."""

    def __init__(self, context: Context, generation: int):
        self._examiner, self._generation = context.examiner, generation
        self._begun: list[Examination] = []

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
        self._begun.append(self._examiner.begin(slot, extents, key, stored, self._generation))
        return self._begun[-1].look

    @property
    def findings(self) -> list[Finding]:
        return [finding for one in self._begun for finding in one.findings]


def tell(context: Context, step: int, findings: Sequence[Finding]) -> None:
    """Let the recorder report what is suspect on this rank, if anything is."""
    if findings:
        context.recorder.suspect(step, in_words(findings), len({finding.tensor for finding in findings}))


def certify(context: Context, due: Saved) -> bool:
    """Check all values of an attempt that training continued from, and certify it if they are numbers.

    What ranks hold alike must also have been the same on all of them.

    Collective over the world; whether it is certified is the same on all ranks.
    """
    findings = _findings_in_all(context, due)
    differed = context.replicas is not None and context.replicas.differed_at == due.step
    is_good, is_suspect = findings == [] and not differed, bool(findings) or differed
    all_good, none_suspect = context.world.agree([int(is_good), int(not is_suspect)])
    if all_good or not none_suspect:
        for slot in context.pool.holding(due.attempt):
            slot.record_verdict(due.attempt, Verdict.CERTIFIED if all_good else Verdict.SUSPECT)
    context.certification.tried(bool(all_good))
    if all_good:
        context.recorder.certified(due.step)
    context.pool.hold_only(context.certification.held)
    return bool(all_good)


def _findings_in_all(context: Context, due: Saved) -> list[Finding] | None:
    """What is suspect in this rank's own slot of an attempt; None: it cannot be read."""
    mine = next((slot for slot in context.pool.holding(due.attempt) if slot in context.pool.own), None)
    if mine is None or mine.header is None:
        return None
    try:
        entries = mine.manifest().entries
    except CorruptSlot as error:  # the scrubber or a restore reports the details
        log.warning("step %d is not certified because rank %d cannot read it: %s", due.step, context.world.rank, error)
        return None
    extents = mine.header.extents
    stored = [Stored(one, one.start, one.nbytes) for one in entries if one.start < extents.payload_nbytes]
    findings = context.examiner.look_at_all(mine, extents, stored)
    tell(context, due.step, findings)
    return findings


def _in_slot(layout: Layout) -> Iterator[Stored]:
    return (Stored(one, one.start, one.nbytes) for one in layout.entries if not layout.is_shared(one))


def _in_share(plan: Plan) -> Iterator[Stored]:
    assert plan.sharing is not None
    for piece in plan.pieces:
        if piece.share == plan.sharing.share:
            yield Stored(plan.layout.entries[piece.leaf], piece.at, piece.end - piece.start)
