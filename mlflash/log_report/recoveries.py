"""Recoveries in place: ranks were lost, the other processes stayed, and all ranks continued after a committed step.

Each round of such training has its own run in the logs of the ranks. The journal of `mlflash run` says which runs
continue each other. They become one launch here, with a stretch of training for each.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from ..human_readable.wording import named
from .formatting import show_seconds
from .journal import Late, Recovered
from .launches import Launch
from .log_statistics import Remark
from .time_accounting import Lost

_APART_S = 1.0  # how far the clock of `mlflash run` may differ from those of the nodes
_SAY = {
    "leave": "to leave the step", "wait": "to wait for the others", "couriers": "to start couriers",
    "checkpointer": "to make a Checkpointer", "groups": "to make process groups", "restore": "to restore",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Recovery:
    """Ranks were lost and replaced in a launch that continued.

    Attributes:
        launch: number of the launch, from 0 on.
        began, ended: when the loss was known, and when all ranks trained again, Unix seconds.
        line: the line of the journal.
        steps_lost: steps from the restored one to the newest that any rank had saved, or that was committed.
        committed_lost: steps to the newest committed one. If this is not 0, more was lost than the redundancy covers.
        lost_s: seconds of lost training.
    """

    launch: int
    began: float
    ended: float
    line: Recovered
    steps_lost: int
    committed_lost: int
    lost_s: float


def joined(launches: Sequence[Launch], recovered: Sequence[Recovered]) -> tuple[list[Launch], list[Recovered]]:
    """Join launches that continue each other in the same processes.

    Args:
        launches: launches, ordered by their begin.
        recovered: recoveries in the journal, ordered by time.

    Returns:
        The launches, and the recoveries in the journal that fit none of them.
    """
    line_of = _line_of(launches, recovered)
    found: list[Launch] = []
    for number, launch in enumerate(launches):
        line = line_of.get(number)
        if line is None:
            found.append(launch)
            continue
        arrives = line_of.get(number + 1) is not line  # rounds before it have failed before all had begun
        found[-1] = _continued(found[-1], launch, line if arrives else None)
    used = {id(line) for line in line_of.values()}
    return found, [line for line in recovered if id(line) not in used]


def _line_of(launches: Sequence[Launch], recovered: Sequence[Recovered]) -> dict[int, Recovered]:
    """Return the line of the journal for each launch that began during a recovery."""
    found: dict[int, Recovered] = {}
    for number, launch in enumerate(launches[1:], 1):
        near = [(max(line.began - launch.began, launch.began - line.time, 0.0), at)
                for at, line in enumerate(recovered)]  # fmt: skip
        apart_s, at = min(near, default=(2 * _APART_S, 0))
        if apart_s <= _APART_S:
            found[number] = recovered[at]
    return found


def _continued(before: Launch, after: Launch, line: Recovered | None) -> Launch:
    """Append a round to those before it. A round without a line failed, and has no training."""
    stretches = list(before.stretches)
    if line is not None:
        last, first = stretches[-1], after.stretches[0]
        last.until = min(max(line.began, last.ready), max(first.until, last.ready))
        first.ready = max(last.until, min(line.time, first.until))
        first.until = max(first.ready, first.until)
        first.from_step = line.step if first.from_step is None else first.from_step
        first.recovered = line
        stretches += after.stretches
    return dataclasses.replace(
        after, run=before.run, events=sorted([*before.events, *after.events], key=lambda event: event.time),
        began=before.began, last=max(after.last, stretches[-1].until), started=after.started or before.started,
        ranks=max(before.ranks, after.ranks) if after.started is None else after.ranks,
        nodes_before=tuple(dict.fromkeys([*before.nodes_before, *before.nodes])),
        places=before.places | after.places, signs=before.signs | after.signs, stretches=stretches,
    )  # fmt: skip


def recoveries(launches: Sequence[Launch], lost: Sequence[Lost]) -> list[Recovery]:
    """Find the recoveries in place, ordered by time."""
    found = []
    for number, launch in enumerate(launches):
        for before, after in itertools.pairwise(launch.stretches):
            line = after.recovered
            if line is None:
                continue
            newest, committed = (max(0, (step or 0) - line.step) for step in (before.newest, before.newest_committed))
            lost_s = sum(one.ended - one.began for one in lost
                         if before.ready <= one.began and one.ended <= before.until)  # fmt: skip
            found.append(Recovery(number, before.until, after.ready, line, newest, committed, lost_s))
    return found


def took(times: Mapping[str, float]) -> str:
    """Write the time of each phase in words."""
    return ", ".join(f"{show_seconds(seconds)} {_SAY.get(name, name)}" for name, seconds in times.items())


def say(recovery: Recovery) -> str:
    """Describe a recovery in a sentence or two."""
    line = recovery.line
    why = f" ({line.why})" if line.why else ""
    text = (f"{named(line.lost)} {'was' if len(line.lost) == 1 else 'were'} lost{why}. The other processes stayed, and "
            f"all ranks continued after step {line.step:,}, {show_seconds(line.seconds)} later")  # fmt: skip
    return f"{text}: {took(line.parts)}" if line.parts else text


def late_remarks(late: Sequence[Late]) -> list[Remark]:
    """Report the ranks that were killed because they were not ready in time."""
    found = []
    for one in late:
        what = "leave its step" if one.phase == "leaving" else "train"
        text = (
            f"rank {one.rank} was killed: after another rank was lost, it did not {what} in time in round {one.round}"
        )
        found.append(Remark(text, "WARNING", 1, one.time, one.time, {one.rank}))
    return found
