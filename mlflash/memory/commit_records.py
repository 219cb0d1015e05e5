"""What records that something was committed, whether or not it can still be used; and why it cannot.

A receipt in any file of an attempt records that it was committed: a receipt of its commit, or of a run that restored
it. A save that died before its first receipt was never reported as committed. If every rank had sealed its slot, it is
nevertheless rolled forward; otherwise it counts as nothing. Pure except for `trace`; nothing is ever written here.
"""

from __future__ import annotations

import dataclasses
import pickle
import zlib
from collections.abc import Iterable, Mapping, Sequence

from ..errors import CorruptSlot
from ..text import listed, named
from .inventory import Place, first_pages
from .node_directory import NodeDirectory, file_name, file_number
from .slot import (
    COMMIT_START,
    MAGIC,
    RESTORES_START,
    Attempt,
    Header,
    Kind,
    Verdict,
    any_record,
    read_verdict,
    unpack,
)

MOST_STEPS = 16
"""Steps of which it is said why they cannot be restored."""
_NAMED = 8


@dataclasses.dataclass(frozen=True)
class Trace:
    """A file in the memory of a node that holds something, or did before it was damaged."""

    place: Place
    # attempt, step: what it holds, by its header or otherwise by its receipt; None and -1 if neither can be read
    attempt: Attempt | None
    step: int
    committed: bool  # whether it has a receipt
    header: Header | None  # its header; None if that is damaged
    damage: str  # what is wrong with it; "" if its header is good
    verdict: Verdict = Verdict.UNKNOWN


def trace(memory: NodeDirectory, node: int) -> list[Trace]:
    """List the files of this node that hold something, including damaged ones."""
    found = []
    for name, page, nbytes in first_pages(memory):
        commit, restores = any_record(page, COMMIT_START), any_record(page, RESTORES_START)
        header, damage = None, ""
        try:
            header = unpack(page)
            if header.extents.nbytes > nbytes:
                damage = f"it has {nbytes:,} bytes of {header.extents.nbytes:,}"
        except CorruptSlot as error:  # a slot that is being written has neither magic nor receipt
            if commit is None and page[: len(MAGIC)] != MAGIC:
                continue
            damage = error.message
        attempt = header.attempt if header is not None else commit[0] if commit is not None else None
        step = header.step if header is not None else commit[1] if commit is not None else -1
        committed = attempt is not None and any(one is not None and one[0] == attempt for one in (commit, restores))
        verdict = Verdict.UNKNOWN if attempt is None else read_verdict(page, attempt)
        found.append(Trace((node, file_number(name)), attempt, step, committed, header, damage, verdict))
    return found


def encode(traces: Sequence[Trace]) -> bytes:
    """Encode what a node holds, to send it to the others."""
    return zlib.compress(pickle.dumps(traces), 1)


def join(packed: Iterable[bytes]) -> list[Trace]:
    """Combine what nodes have sent (see `encode`)."""
    return [one for part in packed for one in pickle.loads(zlib.decompress(part))]


def committed(traces: Iterable[Trace]) -> set[Attempt]:
    """The attempts that were committed."""
    return {one.attempt for one in traces if one.committed and one.attempt is not None}


def floor(traces: Iterable[Trace], mark: int) -> int:
    """The generation from which a fresh start looks: newer than everything without its mark."""
    marks: dict[Attempt, set[int]] = {}
    for one in traces:
        if one.attempt is not None:
            marks.setdefault(one.attempt, set()).update([] if one.header is None else [one.header.mark])
    ours = [attempt.generation for attempt, found in marks.items() if mark in found]
    others = [attempt.generation for attempt, found in marks.items() if found - {mark}]
    # Some attempts have no readable header. If they are newer than our oldest one, they are ours, too.
    unknown = [attempt.generation for attempt, found in marks.items() if not found]
    others += [generation for generation in unknown if not any(known < generation for known in ours)]
    return max(others, default=-1) + 1


def why_not(traces: Sequence[Trace], struck: Mapping[Place, str], nodes: Sequence[str]) -> dict[int, str]:
    """Return for each committed step why it cannot be restored, newest first; ``struck``: what else is damaged."""
    reasons: dict[int, str] = {}
    for attempt in sorted(committed(traces), key=lambda one: one.generation, reverse=True):
        of_attempt = [one for one in traces if one.attempt == attempt]
        if of_attempt[0].step not in reasons and len(reasons) < MOST_STEPS:
            reasons[of_attempt[0].step] = _why(of_attempt, traces, struck, nodes)
    return reasons


def _why(
    of_attempt: Sequence[Trace], traces: Sequence[Trace], struck: Mapping[Place, str], nodes: Sequence[str]
) -> str:
    wrong = {one.place: one.damage or struck.get(one.place, "") for one in of_attempt}
    headers = [one.header for one in of_attempt if one.header is not None]
    slots = {
        one.header.rank for one in of_attempt if not wrong[one.place] and one.header and one.header.kind is Kind.SLOT
    }
    spoilt = {one.header.rank for one in of_attempt if wrong[one.place] and one.header and one.header.kind is Kind.SLOT}
    size = max((header.world_size for header in headers), default=0)
    gone = {*range(size)} - slots - spoilt
    reasons = []
    if gone:
        was = sorted({one.header.node for one in traces if one.header and one.header.rank in gone})
        here = sorted({header.node for header in headers})
        other = f"what is here is of ranks that were on {listed(here, _NAMED)}"
        where = f"they were on {listed(was, _NAMED)}" if was else other
        reasons.append(f"no slot and no copy of {named(gone)} of {size} is on the nodes that are here: {where}")
    parities = {header.group: header.parities for header in headers if header.kind is Kind.PARITY}
    for group, losses in sorted(parities.items()):
        if lost := {*group} - slots:
            reasons.append(f"{len(lost)} of the {len(group)} {named(group)} that protect each other have no "
                        f"slot; at most {losses} may be without")  # fmt: skip
    bad = [f"{file_name(place[1])} on {nodes[place[0]]}: {why}" for place, why in sorted(wrong.items()) if why]
    reasons += bad[:_NAMED] + ([f"{len(bad) - _NAMED} more files are damaged"] if len(bad) > _NAMED else [])
    if not reasons and any(one.verdict is Verdict.BAD for one in of_attempt):
        return "it was marked bad"
    return "; ".join(reasons) or "no node that is here has a share of the tensors that ranks hold alike"
