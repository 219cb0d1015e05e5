"""How long training stood still after a failure, and where the time went. Pure."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

Heartbeat = dict[str, Any]  # what a rank reported last, see `mlflash.telemetry.heartbeat`


@dataclasses.dataclass(frozen=True)
class Failure:
    """The end of a start.

    Attributes:
        last_beat: when the training of any rank last made progress, Unix time.
        noticed: when `mlflash run` had noticed the failure and ended the remaining ranks, Unix time.
        saved: the last step that any rank gave to a save; None if there was none, or if it is unknown.
    """

    last_beat: float
    noticed: float
    saved: int | None


def failure(heartbeats: Sequence[Heartbeat], noticed: float) -> Failure:
    """How a start ended, from the last heartbeats of its ranks."""
    beats = [float(heartbeat["beat"]) for heartbeat in heartbeats]
    saved = [int(heartbeat["saved"]) for heartbeat in heartbeats if heartbeat["saved"] is not None]
    return Failure(max(beats, default=noticed), noticed, max(saved, default=None))


def unrestorable(heartbeats: Sequence[Heartbeat]) -> str:
    """Why a start could restore none of the existing checkpoints, as its ranks reported; "" if it could."""
    return next((str(heartbeat["unrestorable"]) for heartbeat in heartbeats if heartbeat.get("unrestorable")), "")


def certified(heartbeats: Sequence[Heartbeat]) -> int | None:
    """The newest certified step that the ranks of a start reported; None if there is none."""
    return max((int(heartbeat["certified"]) for heartbeat in heartbeats if "certified" in heartbeat), default=None)


def is_suspect(heartbeats: Sequence[Heartbeat]) -> bool:
    """Whether the values of any rank were suspect in the last save of a start."""
    return any("suspect" in heartbeat and heartbeat["suspect"] >= (heartbeat["committed"] or 0)
               for heartbeat in heartbeats)  # fmt: skip


def recovery(heartbeats: Sequence[Heartbeat], before: Failure | None, started: float) -> dict[str, Any]:
    """What a start restored, and how long the recovery from the failure before it took, for the log of the run.

    Args:
        heartbeats: of its ranks.
        before: how the start before it ended; None if there was none.
        started: when the launcher was called, Unix time.
    """
    found: dict[str, Any] = {what: next((heartbeat[what] for heartbeat in heartbeats if heartbeat[what]), None)
                             for what in ("restored", "source")}  # fmt: skip
    times = {what: [heartbeat["times"][what] for heartbeat in heartbeats if what in heartbeat["times"]]
             for what in ("made", "restored", "saved")}  # fmt: skip
    if before is None or not all(times.values()):
        return found
    made, restored, saved = (max(times[what]) for what in ("made", "restored", "saved"))
    if before.saved is not None and found["restored"] is not None:
        found["steps_lost"] = before.saved - found["restored"]
    marks = (before.last_beat, before.noticed, started, made, restored, saved)
    spans = [round(after - first, 3) for first, after in itertools.pairwise(marks)]
    names = ("detect_s", "look_s", "launch_s", "restore_s", "first_step_s")
    return found | {"outage_s": round(saved - before.last_beat, 3)} | dict(zip(names, spans, strict=True))
