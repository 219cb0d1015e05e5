"""Checks the values of a save against those of the saves before: could training have come to them.

While checksums are made, some of the blocks are checked, others at each save, so that all are checked after a number of
saves. A part that was suspect is checked each time until it is as before. A part is suspect if it has NaN; if it has
infinities that it did not have when it was first checked; if all of it is zero and was not before; or if its largest
magnitude is far beyond everything before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ..memory.slot import Slot
from ..state.layout import Extents
from .checked_parts import CheckedParts, Run, Stored, find
from .float_formats import FloatFormat, count, largest

_LEAST_STRETCHES = 16  # each save checks at least so many, or all if there are fewer
_LEAP = 7  # a magnitude is suspect if it is larger than all before by a factor of two to this power
_LEAST = -4  # smaller ones before it count as two to this power, because moments grow from nothing
_VALUES = -40  # a part held values if its largest was at least two to this power
_FEW = 16  # in a part with fewer values only NaN and infinities count, because counters leap
_NAMED = 4  # findings that a text describes
_ENOUGH = 64  # most findings of a save: if everything is NaN, more of them tell nothing new
_LAYOUTS = 4  # layouts whose earlier values are remembered
_NEVER = -1


class Finding(NamedTuple):
    """Something suspect.

    Attributes:
        what: "NaN" | "infinite" | "zero" | "large".
    """

    tensor: str
    what: str
    text: str


class _Held:
    """What the parts of one layout have held so far."""

    def __init__(self, key: object, parts: CheckedParts):
        self.key, self.parts = key, parts
        number = len(self.parts.names)
        self.most = np.full(number, _NEVER, np.int64)  # largest bits in any check that found nothing suspect
        self.last = np.full(number, _NEVER, np.int64)
        self.suspect: set[int] = set()  # numbers of parts
        self.infinity, self.nan = self._each(lambda form: form.infinity), self._each(lambda form: form.nan)
        self.least = self._each(lambda form: form.bits(_LEAST))
        self.values = self._each(lambda form: form.bits(_VALUES))
        self.leap = self._each(lambda form: _LEAP << form.mantissa)
        parts_of = [sum(run.bounds.size // 2 for run in runs) for runs in parts.runs]
        self.stretch_of = np.repeat(np.arange(len(parts_of)), parts_of)

    @property
    def infinite_from_the_start(self) -> set[str]:
        """Names of tensors that had infinities when they were first looked at."""
        return {self.parts.names[part] for part in np.flatnonzero(self.most >= self.infinity)}

    def _each(self, number: Callable[[FloatFormat], int]) -> np.ndarray:
        """A number of each part, by its format."""
        return np.array([number(form) for form in self.parts.formats], np.int64)


class Examiner:
    """Checks what this rank saves. Not collective; for the courier.

    Args:
        share: fraction of the blocks of a large state that each save checks, 0 to 1.
        skip: patterns of names of tensors that are not checked.
    """

    def __init__(self, share: float, skip: Sequence[str]):
        self._every = max(1, round(1 / share)) if share else 0
        self._skip = tuple(skip)
        self._known: list[_Held] = []  # the newest last

    @property
    def is_on(self) -> bool:
        return self._every > 0

    def begin(self, slot: Slot, extents: Extents, key: object, stored: Callable[[], Iterable[Stored]],
              generation: int) -> Examination:  # fmt: skip
        """Begin to check what a save has put into a slot or a share.

        Args:
            key: key of what ``stored`` returns: the same or an equal one for the same tensors in the same places.
            generation: of the attempt: it decides which blocks are checked.
        """
        held = next((one for one in self._known if one.parts.extents == extents and one.key == key), None)
        if held is None:
            held = _Held(key, find(stored(), extents, self._skip))
        self._known = [*[one for one in self._known if one is not held][1 - _LAYOUTS :], held]
        stretches = len(held.parts.runs)
        every = max(1, min(self._every, stretches // _LEAST_STRETCHES))
        wanted = set(range(generation % every, stretches, every))
        return Examination(held, slot, wanted | {int(held.stretch_of[part]) for part in held.suspect})

    def look_at_all(self, slot: Slot, extents: Extents, stored: Iterable[Stored]) -> list[Finding]:
        """Check all that a slot holds for NaN, and for infinities where all was finite, whatever it held before."""
        parts = find(stored, extents, self._skip)
        payload = slot.payload(extents)
        findings: list[Finding] = []
        usual = {name for held in self._known for name in held.infinite_from_the_start}
        for run in (run for runs in parts.runs for run in runs):
            if len(findings) >= _ENOUGH:
                break
            now = largest(payload[run.start : run.end], run.form, run.bounds)
            for nth in np.flatnonzero(now >= run.form.infinity):
                name, what = parts.names[run.first + nth], "NaN" if now[nth] >= run.form.nan else "infinite"
                if what == "NaN" or name not in usual:
                    findings.append(Finding(name, what, f"{name} has values that are {what}"))
        return findings

    def forget(self) -> None:
        """Forget what tensors held: the state is now another one, or a user says that it is good as it is."""
        self._known.clear()


class Examination:
    """One check of one slot."""

    def __init__(self, held: _Held, slot: Slot, wanted: set[int]):
        self._held, self._wanted = held, wanted
        self._payload = slot.payload(held.parts.extents)
        self._next = 0  # number of the next stretch
        self.findings: list[Finding] = []

    def look(self, upto: int) -> None:
        """Check the chosen blocks below a given one, unless that was done already."""
        parts = self._held.parts
        stretches = len(parts.runs) if upto >= parts.extents.blocks else upto // parts.stretch
        for number in range(self._next, stretches):
            if number in self._wanted and len(self.findings) < _ENOUGH:
                for run in parts.runs[number]:
                    self._compare(run)
        self._next = max(self._next, stretches)

    def _compare(self, run: Run) -> None:
        held, its = self._held, slice(run.first, run.first + run.bounds.size // 2)
        now = largest(self._payload[run.start : run.end], run.form, run.bounds)
        most, last, infinity, many = held.most[its], held.last[its], held.infinity[its], held.parts.counts[its] >= _FEW
        was_looked_at = most != _NEVER
        nan = now >= held.nan[its]
        infinite = ~nan & (now >= infinity) & was_looked_at & (most < infinity)
        zero = (now == 0) & many & (last >= held.values[its])
        usual = np.maximum(most, held.least[its])
        large = (now < infinity) & many & was_looked_at & (now > usual + held.leap[its])
        wrong = nan | infinite | zero | large
        if wrong.any() or held.suspect:
            self._judge(run, now, {"NaN": nan, "infinite": infinite, "zero": zero, "large": large})
        held.most[its] = np.where(wrong, most, np.maximum(most, now))
        held.last[its] = np.where(wrong, last, now)

    def _judge(self, run: Run, now: np.ndarray, wrong: dict[str, np.ndarray]) -> None:
        """Note what is suspect, and what is not suspect any more."""
        held = self._held
        for nth in range(run.bounds.size // 2):
            part = run.first + nth
            what = next((kind for kind, those in wrong.items() if those[nth]), None)
            if what is None:
                held.suspect.discard(part)
                continue
            held.suspect.add(part)
            self.findings.append(Finding(held.parts.names[part], what, self._say(run, nth, what, int(now[nth]))))

    def _say(self, run: Run, nth: int, what: str, bits: int) -> str:
        held, part = self._held, run.first + nth
        name = held.parts.names[part]
        before = run.form.value(max(0, int(held.most[part])))
        if what == "zero":
            return f"{name} is all zero; before, its largest value was {before:.3g}"
        if what == "large":
            return f"the largest value of {name} is {run.form.value(bits):.3g}; before, it was {before:.3g}"
        size = run.form.nbytes
        low, high = (int(at) * size for at in run.bounds[2 * nth : 2 * nth + 2])
        nans, infinite = count(self._payload[run.start + low : run.start + high], run.form)
        number, kind = (nans, "NaN") if what == "NaN" else (infinite, "infinite")
        return f"{number:,} of {(high - low) // size:,} values of {name} are {kind}"


def in_words(findings: Sequence[Finding]) -> str:
    """Describe the first few findings; a tensor that is in several blocks counts once."""
    told = {finding.tensor: finding.text for finding in reversed(findings)}
    named = [told[tensor] for tensor in dict.fromkeys(finding.tensor for finding in findings)]
    more = len(named) - _NAMED
    return "; ".join(named[:_NAMED]) + (f"; and {more} more tensors" if more > 0 else "")
