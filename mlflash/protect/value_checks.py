"""Checks the values of a save against those of the saves before: could training have come to them.

While checksums are made, some of the blocks are checked, others at each save, so that all are checked after a number of
saves. A part that was suspect is checked each time until it is as before. A part is suspect if it has NaN; if it has
infinities that it did not have when it was first checked; if all of it is zero and was not before; or if its largest
magnitude is far beyond everything before.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..memory.slot import Slot
from ..state.layout import Extents
from ..state.leaves import Entry

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
    """Something suspect."""

    tensor: str
    what: str  # "NaN" | "infinite" | "zero" | "large"
    text: str


class _History:
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

    def _each(self, number: Callable[[FloatFormat], int]) -> np.ndarray:
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
        self._histories: list[_History] = []  # the newest last

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
        same = (known for known in self._histories if (known.parts.extents, known.key) == (extents, key))
        history = next(same, None)
        if history is None:
            history = _History(key, find(stored(), extents, self._skip))
        self._histories = [*[known for known in self._histories if known is not history][1 - _LAYOUTS :], history]
        stretches = len(history.parts.runs)
        every = max(1, min(self._every, stretches // _LEAST_STRETCHES))
        wanted = set(range(generation % every, stretches, every))
        return Examination(history, slot, wanted | {int(history.stretch_of[part]) for part in history.suspect})

    def examine_all(self, slot: Slot, extents: Extents, stored: Iterable[Stored]) -> list[Finding]:
        """Check all that a slot holds for NaN, and for infinities where all was finite, whatever it held before."""
        parts = find(stored, extents, self._skip)
        payload = slot.payload(extents)
        findings: list[Finding] = []
        usual = {history.parts.names[part] for history in self._histories  # infinite when it was first examined
                 for part in np.flatnonzero(history.most >= history.infinity)}  # fmt: skip
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
        self._histories.clear()


class Examination:
    """One check of one slot."""

    def __init__(self, history: _History, slot: Slot, wanted: set[int]):
        self._history, self._wanted = history, wanted
        self._payload = slot.payload(history.parts.extents)
        self._next = 0  # number of the next stretch
        self.findings: list[Finding] = []

    def examine(self, upto: int) -> None:
        """Check the chosen blocks below a given one, unless that was done already."""
        parts = self._history.parts
        stretches = len(parts.runs) if upto >= parts.extents.blocks else upto // parts.stretch
        for number in range(self._next, stretches):
            if number in self._wanted and len(self.findings) < _ENOUGH:
                for run in parts.runs[number]:
                    self._compare(run)
        self._next = max(self._next, stretches)

    def _compare(self, run: Run) -> None:
        history, parts = self._history, slice(run.first, run.first + run.bounds.size // 2)
        now = largest(self._payload[run.start : run.end], run.form, run.bounds)
        most, last, infinity, many = (
            history.most[parts],
            history.last[parts],
            history.infinity[parts],
            history.parts.counts[parts] >= _FEW,
        )
        was_examined = most != _NEVER
        nan = now >= history.nan[parts]
        infinite = ~nan & (now >= infinity) & was_examined & (most < infinity)
        zero = (now == 0) & many & (last >= history.values[parts])
        usual = np.maximum(most, history.least[parts])
        large = (now < infinity) & many & was_examined & (now > usual + history.leap[parts])
        wrong = nan | infinite | zero | large
        if wrong.any() or history.suspect:
            self._judge(run, now, {"NaN": nan, "infinite": infinite, "zero": zero, "large": large})
        history.most[parts] = np.where(wrong, most, np.maximum(most, now))
        history.last[parts] = np.where(wrong, last, now)

    def _judge(self, run: Run, now: np.ndarray, wrong: dict[str, np.ndarray]) -> None:
        history = self._history
        for nth in range(run.bounds.size // 2):
            part = run.first + nth
            what = next((kind for kind, parts in wrong.items() if parts[nth]), None)
            if what is None:
                history.suspect.discard(part)
                continue
            history.suspect.add(part)
            self.findings.append(Finding(history.parts.names[part], what, self._say(run, nth, what, int(now[nth]))))

    def _say(self, run: Run, nth: int, what: str, bits: int) -> str:
        history, part = self._history, run.first + nth
        name = history.parts.names[part]
        before = run.form.value(max(0, int(history.most[part])))
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
    text_of = {finding.tensor: finding.text for finding in reversed(findings)}
    named = [text_of[tensor] for tensor in dict.fromkeys(finding.tensor for finding in findings)]
    more = len(named) - _NAMED
    return "; ".join(named[:_NAMED]) + (f"; and {more} more tensors" if more > 0 else "")


# Which bytes of a slot are values to be checked, and of which tensor


STRETCH_NBYTES = 1 << 20
"""What is examined at a time, so that numpy's calls take no time: a block or, where these are small, some."""


class Stored(NamedTuple):
    """Bytes of a tensor in a slot or in a share."""

    entry: Entry
    start: int  # where they begin, bytes from the start of the payload
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Run:
    """Values of one format in a stretch."""

    form: FloatFormat
    # start, end: where they are, bytes from the start of the payload
    start: int
    end: int
    bounds: np.ndarray  # where the values of each tensor begin and end, in values from `start`
    first: int  # number of the first of these parts; the others follow


@dataclasses.dataclass(frozen=True)
class CheckedParts:
    """The parts of tensors in each stretch of a body."""

    extents: Extents
    stretch: int  # number of blocks in a stretch
    runs: tuple[tuple[Run, ...], ...]
    names: tuple[str, ...]  # the tensor of each part
    counts: np.ndarray  # number of values of each part
    formats: tuple[FloatFormat, ...]


def find(stored: Iterable[Stored], extents: Extents, skip: Sequence[str]) -> CheckedParts:
    """Find what has to be checked: floats with values, but those named in ``skip``; tied tensors may come twice."""
    wanted = {
        part.start: part for part in stored if part.nbytes and part.entry.dtype in FORMATS and
        not any(fnmatch.fnmatchcase(part.entry.name, pattern) for pattern in skip)
    }  # fmt: skip
    stretch = max(1, STRETCH_NBYTES // extents.block_nbytes)
    parts: list[Stored] = []
    stretches = _by_stretch([wanted[at] for at in sorted(wanted)], extents, stretch)
    runs = tuple(tuple(_runs(in_stretch, parts)) for in_stretch in stretches)
    formats = tuple(FORMATS[part.entry.dtype] for part in parts)
    counts = np.array([part.nbytes // form.nbytes for part, form in zip(parts, formats, strict=True)], np.int64)
    return CheckedParts(extents, stretch, runs, tuple(part.entry.name for part in parts), counts, formats)


def _by_stretch(stored: Sequence[Stored], extents: Extents, stretch: int) -> list[list[Stored]]:
    """Cut tensors where stretches end."""
    nbytes = stretch * extents.block_nbytes
    cut: list[list[Stored]] = [[] for _ in range(-(-extents.body_nbytes // nbytes))]
    for part in stored:
        at, end = part.start + extents.manifest_room, part.start + part.nbytes + extents.manifest_room
        while at < end:
            upto = min(end, (at // nbytes + 1) * nbytes)
            cut[at // nbytes].append(Stored(part.entry, at - extents.manifest_room, upto - at))
            at = upto
    return cut


def _runs(stored: Sequence[Stored], parts: list[Stored]) -> Iterator[Run]:
    at = 0
    while at < len(stored):
        form, end = FORMATS[stored[at].entry.dtype], at
        while end < len(stored) and FORMATS[stored[end].entry.dtype] is form:
            end += 1
        run = stored[at:end]
        start, stop = run[0].start, run[-1].start + run[-1].nbytes
        edges = [edge for part in run for edge in (part.start, part.start + part.nbytes)]
        bounds = (np.array(edges, np.int64) - start) // form.nbytes
        yield Run(form, start, stop, bounds, len(parts))
        parts += run
        at = end


# Magnitudes of floats grow with their bits, read as integers (IEEE 754-2019, 3.4; OCP's 8-bit formats, too). So two
# maxima are enough: of the bits as signed integers for the largest positive value, and as unsigned ones for the most
# negative one. Infinity and NaN are larger than everything finite.


@dataclasses.dataclass(frozen=True)
class FloatFormat:
    """A format of floats."""

    nbytes: int
    mantissa: int
    bias: int
    infinity: int  # bits of infinity; if the format has none, the same as `nan`
    nan: int  # the smallest bits, without the sign, that are not a number
    negative_zero_is_nan: bool = False  # whether the only NaN is what would be -0

    @functools.cached_property
    def sign(self) -> int:
        return 1 << (8 * self.nbytes - 1)

    def value(self, bits: int) -> float:
        """The number that bits without a sign stand for."""
        if bits >= self.infinity:
            return float("inf") if bits < self.nan else float("nan")
        exponent, rest = bits >> self.mantissa, (bits & ((1 << self.mantissa) - 1)) / (1 << self.mantissa)
        return float(rest * 2.0 ** (1 - self.bias) if not exponent else (1 + rest) * 2.0 ** (exponent - self.bias))

    def bits(self, exponent: int) -> int:
        """The bits of two to the power of ``exponent``, or those of the nearest power that the format has."""
        return min(max(1, (exponent + self.bias) << self.mantissa), self.infinity - 1)


_FLOAT64 = FloatFormat(8, 52, 1023, 0x7FF0 << 48, (0x7FF0 << 48) + 1)
_FLOAT32 = FloatFormat(4, 23, 127, 0x7F800000, 0x7F800001)
_FLOAT16 = FloatFormat(2, 10, 15, 0x7C00, 0x7C01)
_ONLY_FINITE = 0x80  # larger than all 8-bit magnitudes: there is no infinity

FORMATS = {
    "float64": _FLOAT64, "float32": _FLOAT32, "float16": _FLOAT16,
    "bfloat16": FloatFormat(2, 7, 127, 0x7F80, 0x7F81),
    "float8_e4m3fn": FloatFormat(1, 3, 7, 0x7F, 0x7F),
    "float8_e5m2": FloatFormat(1, 2, 15, 0x7C, 0x7D),
    "float8_e4m3fnuz": FloatFormat(1, 3, 8, _ONLY_FINITE, _ONLY_FINITE, negative_zero_is_nan=True),
    "float8_e5m2fnuz": FloatFormat(1, 2, 16, _ONLY_FINITE, _ONLY_FINITE, negative_zero_is_nan=True),
    "complex32": _FLOAT16, "complex64": _FLOAT32, "complex128": _FLOAT64,
    "<f2": _FLOAT16, "<f4": _FLOAT32, "<f8": _FLOAT64, "<c8": _FLOAT32, "<c16": _FLOAT64,
}  # fmt: skip
"""By the dtype of an entry, see `state.leaves.Entry`."""


def largest(raw: np.ndarray, form: FloatFormat, bounds: Sequence[int] | np.ndarray) -> np.ndarray:
    """The largest magnitudes in runs of values, as bits: ``(runs,)`` int64.

    Args:
        raw: the bytes, ``(nbytes,)`` uint8, contiguous and aligned to the format.
        bounds: where each run begins and ends, in values, one after the other, ascending: ``(2 * runs,)``. No run is
            empty.
    """
    unsigned = raw.view(f"<u{form.nbytes}")
    signed = unsigned.view(f"<i{form.nbytes}")
    if len(bounds) == 2:
        low, high = bounds
        most, least = signed[low:high].max(keepdims=True), unsigned[low:high].max(keepdims=True)
    else:
        # Every other result is of the bytes between two runs: drop it. The last bound may be the end of the array.
        at = bounds[:-1] if bounds[-1] == unsigned.size else bounds
        most, least = np.maximum.reduceat(signed, at)[::2], np.maximum.reduceat(unsigned, at)[::2]
    least = least.astype(np.uint64)
    negative = np.where(least & np.uint64(form.sign), least & np.uint64(form.sign - 1), np.uint64(0))
    magnitudes: np.ndarray = np.maximum(most.astype(np.int64), negative.astype(np.int64))
    if form.negative_zero_is_nan:
        for nth, (low, high) in enumerate(zip(bounds[::2], bounds[1::2], strict=True)):
            if (unsigned[low:high] == form.sign).any():
                magnitudes[nth] = form.nan
    return magnitudes


def count(raw: np.ndarray, form: FloatFormat) -> tuple[int, int]:
    """How many of some values are NaN, and how many are infinite."""
    unsigned = raw.view(f"<u{form.nbytes}")
    if form.negative_zero_is_nan:
        return int(np.count_nonzero(unsigned == form.sign)), 0
    magnitudes = unsigned & np.array(form.sign - 1, unsigned.dtype)
    nans = int(np.count_nonzero(magnitudes >= form.nan))
    return nans, int(np.count_nonzero(magnitudes >= form.infinity)) - nans
