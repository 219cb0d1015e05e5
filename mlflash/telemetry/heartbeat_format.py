"""The content of a rank's heartbeat: its trainer's part, its courier's part, and both combined. Pure.

The file has two parts of 4096 bytes, the trainer's first. A part is a JSON object, padded with spaces, or blank. Each
process writes only its own part, in one write, so that neither waits for the other, or loses what it wrote.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from ..version import __version__

FORMAT = 1
PART_NBYTES = 4096  # written in one call, so that a reader never finds parts of two

_LARGEST = 1 << 63
_SHORT = 64  # letters of each text if all of them together are too long
_STATES = ("started", "ended", "failed")
_NUMBER = int | float
_OF_BOTH: dict[str, Any] = {"format": int, "start": str, "rank": int, "pid": int, "pid_namespace": int, "state": str,
                            "times": dict, "beat": _NUMBER}  # fmt: skip
# Required and optional fields of the parts. A reader need not check them again.
_TRAINER = _OF_BOTH | {
    "run": str,
    "ranks": int,
    "node": str,
    "restored": int | None,
    "source": str,
    "saved": int | None,
}
_TRAINER_MAY: dict[str, Any] = {"redundancy": str} | dict.fromkeys(
    ("nodes", "stall_s", "stalled_s", "nbytes", "restored_at"), _NUMBER
)
_COURIER = _OF_BOTH | {"committed": int | None}
_LATE = ("late_s", "late_in", "slowest", "slowest_on", "slowest_s", "slowest_in")
_COURIER_MAY: dict[str, Any] = dict.fromkeys(("unrestorable", "late_in", "slowest_on", "slowest_in"), str)
_COURIER_MAY |= dict.fromkeys((
    "drained", "protect_s", "commit_s", "held", "saves", "failed", "unrestorable_at", "late_s", "slowest_s", "suspect",
    "suspect_tensors", "certified",
), _NUMBER)  # fmt: skip
_COURIER_MAY |= {"slowest": int, "damaged": int}
# What only the courier knows of a rank, and with which of these fields the next courier of this trainer continues.
_COURIER_TELLS = (
    "committed", "drained", "protect_s", "commit_s", "held", "saves", "failed", "damaged", "unrestorable", "suspect",
    "suspect_tensors", "certified", *_LATE,
)  # fmt: skip
_GOES_ON = (
    "committed", "drained", "saves", "failed", "damaged", "unrestorable", "unrestorable_at", "suspect", "certified",
    "times",
)  # fmt: skip
# The fields of both parts together.
_OF_PART = ("start", "pid_namespace")
_RANK = {name: kind for name, kind in _TRAINER.items() if name not in _OF_PART}
_RANK |= {"committed": int | None, "alive": bool}
_RANK_MAY = (
    _TRAINER_MAY
    | _COURIER_MAY
    | {
        "courier_pid": int | None,
        "courier_alive": bool | None,
        "courier_beat": _NUMBER | None,
        "courier_state": str | None,
    }
)


def encode(said: Mapping[str, Any]) -> bytes:
    """Encode what a process reports; never longer than a part, because the other one begins there."""
    text = json.dumps(said, separators=(",", ":")).encode()
    if len(text) > PART_NBYTES:
        short = {name: value[-_SHORT:] if isinstance(value, str) else value for name, value in said.items()}
        text = json.dumps(short, separators=(",", ":")).encode()
    return text.ljust(PART_NBYTES)[:PART_NBYTES]


def trainer_part(text: bytes) -> dict[str, Any] | str | None:
    """Read the trainer's part, or return why it cannot be read; None if it is blank."""
    return _part(text, _TRAINER, _TRAINER_MAY)


def courier_part(text: bytes) -> dict[str, Any] | str | None:
    """Read the courier's part, or return why it cannot be read; None if it is blank."""
    return _part(text, _COURIER, _COURIER_MAY)


def carried_on(before: Mapping[str, Any] | str | None, start: str, rank: int) -> dict[str, Any]:
    """Return what a courier continues from: what the courier before it reported, if that had the same trainer.

    Args:
        before: what `courier_part` has found.
        start, rank: of the trainer.
    """
    if not isinstance(before, Mapping) or (before["start"], before["rank"]) != (start, rank):
        return {}
    return {name: before[name] for name in _GOES_ON if name in before}


def together(trainer: Mapping[str, Any], courier: Mapping[str, Any] | None, alive: bool, courier_alive: bool
             ) -> dict[str, Any]:  # fmt: skip
    """Combine what the trainer and the courier of a rank report: only the trainer decides its life and its progress.

    Args:
        trainer, courier: their parts. The courier's is left out if it belongs to another start, and None if it cannot
            be read.
        alive, courier_alive: whether their processes are alive.

    Returns:
        What both report, as if they were one process, ``alive`` of the trainer, and ``courier_pid``, ``courier_alive``,
        ``courier_beat`` and ``courier_state``, each None if nothing is known about a courier. A pid is 0 if the process
        has another pid namespace than who reads: it counts as alive.
    """
    names = (name for name in (*_TRAINER, *_TRAINER_MAY, "version") if name not in (*_OF_PART, "restored_at"))
    said: dict[str, Any] = {name: trainer[name] for name in names if name in trainer}
    said |= {"committed": None, "alive": alive}
    said |= dict.fromkeys(("courier_pid", "courier_alive", "courier_beat", "courier_state"))
    if courier is None or (courier["start"], courier["rank"]) != (trainer["start"], trainer["rank"]):
        return said
    said |= {name: courier[name] for name in _COURIER_TELLS if name in courier}
    said |= {"courier_pid": courier["pid"], "courier_alive": courier_alive, "courier_beat": courier["beat"],
             "courier_state": courier["state"], "times": courier["times"] | trainer["times"]}  # fmt: skip
    if (trainer.get("restored_at") or 0) >= (courier.get("unrestorable_at") or 0):
        said.pop("unrestorable", None)  # another checkpoint could be restored since
    return said


def has_own_courier(heartbeat: Mapping[str, Any]) -> bool:
    """Whether a separate process is the courier of a rank, as far as is known."""
    return heartbeat.get("courier_pid") not in (None, heartbeat["pid"])


def is_orphan(heartbeat: Mapping[str, Any]) -> bool:
    """Whether the trainer of a rank has ended, and its courier still finishes what the trainer had saved."""
    return (
        not heartbeat["alive"] and has_own_courier(heartbeat)
        and heartbeat.get("courier_state") == "started" and bool(heartbeat.get("courier_alive"))
    )  # fmt: skip


def is_without_courier(heartbeat: Mapping[str, Any]) -> bool:
    """Whether the courier of a rank died unexpectedly, and its trainer continues."""
    return (
        heartbeat["state"] == "started" and heartbeat["alive"] and has_own_courier(heartbeat)
        and heartbeat.get("courier_state") == "started" and not heartbeat.get("courier_alive")
    )  # fmt: skip


def why_unread(said: object) -> str:
    """Why what a rank reports (see `together`) cannot be read; "" if it can. It may come from another version."""
    return _why_unread(said, _RANK, _RANK_MAY)


def _part(text: bytes, must: Mapping[str, Any], may: Mapping[str, Any]) -> dict[str, Any] | str | None:
    if not text.strip(b"\0 "):  # the process has just made it
        return None
    try:
        said: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError):
        return "cannot be read: it is torn, or no heartbeat"
    return _why_unread(said, must, may) or said


def _why_unread(said: object, must: Mapping[str, Any], may: Mapping[str, Any]) -> str:
    if not isinstance(said, dict):
        return "cannot be read: it is no heartbeat"
    written = said.get("format")
    is_known = _is_a(written, int) and written == FORMAT  # JSON's true is equal to 1
    wrong = [] if is_known else [f"format {_short(written)} and not {FORMAT}"]
    wrong += [name for name, kind in must.items() if name != "format" and not _is_a(said.get(name, ...), kind)]
    wrong += [name for name, kind in may.items() if name in said and not _is_a(said[name], kind)]
    if not wrong:
        times = said["times"]
        wrong += ["state"] * (said["state"] not in _STATES)
        wrong += ["pid"] * (said["pid"] < (0 if must is _RANK else 1))
        wrong += ["courier_pid"] * ((said.get("courier_pid") or 0) < 0)
        wrong += ["times"] * (not all(_is_a(when, _NUMBER) for when in times.values()))
        wrong += ["times"] * (said.get("restored") is not None and "restored" not in times)
    if not wrong:
        return ""
    version = said.get("version")
    by = f"version {_short(version)}" if isinstance(version, str) else "a version that does not say which it is"
    return f"cannot be read: written by {by} (this is {__version__}; {', '.join(wrong[:3])})"


def _is_a(value: object, kind: Any) -> bool:
    """Whether a value has a type, and, if it is a number, is finite and not too large."""
    if isinstance(value, bool):
        return kind is bool or kind == (bool | None)
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return isinstance(value, kind) and not (isinstance(value, int | float) and abs(value) >= _LARGEST)


def _short(value: object) -> str:
    return str(value)[:_SHORT]
