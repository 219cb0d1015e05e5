"""What a rank reports about itself to programs that look at its node from outside: a small file in the job's memory.

`mlflash run` reads it to tell training that continues from training that hangs, and a run that ended from one that did
not: launchers of MPI return 0 after a lost node. `mlflash top` and metrics show it. It is written by plain writes to
memory, whatever MPI does. The file has two parts of 4096 bytes, the trainer's first, then the courier's. A part is a
JSON object, padded with spaces, or blank. Each process writes only its own part, in one write, so that neither waits
for the other, or loses what it wrote, even if the other is dead. Who reads, reads until two reads agree: tmpfs may show
a write in part.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from ..errors import UnsafePath
from ..memory.node_directory import NodeDirectory, jobs_of
from ..memory.process_names import read_stat
from ..version import __version__

log = logging.getLogger("mlflash")

PART_NBYTES = 4096

_READS = 20  # at most so many until two agree
_SHORT = 64  # letters of each text if all of them together are too long
_LETTERS = 512  # most characters of a text; each may take six bytes
SHOW_STACKS = signal.SIGRTMIN + 7
"""The signal at which trainer and courier of a rank that `mlflash run` has started print where each thread is."""

_Integer = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
_Number = Annotated[float, Meta(gt=-(2.0**63), lt=2.0**63)]
_OF_BOTH: dict[str, Any] = {"format": Literal[1], "rank": _Integer, "state": Literal["started", "ended", "failed"],
                            "times": dict[str, _Number], "beat": _Number}  # fmt: skip
_OF_PROCESS = _OF_BOTH | {"start": str, "pid": Annotated[int, Meta(ge=1, le=1 << 62)], "pid_namespace": _Integer}
_OF_TRAINER = {"run": str, "ranks": _Integer, "node": str, "restored": _Integer | None, "source": str,
               "saved": _Integer | None}  # fmt: skip
_OF_COURIER = {"committed": _Integer | None}
_ALSO_OF_TRAINER: dict[str, Any] = {"version": str, "redundancy": str} | dict.fromkeys(
    ("nodes", "stall_s", "stalled_s", "nbytes", "restored_at"), _Number
)
_ALSO_OF_COURIER: dict[str, Any] = dict.fromkeys(("unrestorable", "late_in", "slowest_on", "slowest_in"), str)
_ALSO_OF_COURIER |= {"slowest": _Integer, "damaged": _Integer} | dict.fromkeys((
    "drained", "protect_s", "commit_s", "committed_at", "held", "saves", "failed", "late_s", "slowest_s", "suspect",
    "suspect_tensors", "certified",
), _Number)  # fmt: skip
_ABOUT_COURIER: dict[str, Any] = {"courier_pid": Annotated[int, Meta(ge=0, le=1 << 62)] | None,
                                  "courier_alive": bool | None, "courier_beat": _Number | None,
                                  "courier_state": str | None}  # fmt: skip


def _document(name: str, fields: Mapping[str, Any], optional: Mapping[str, Any]) -> type[msgspec.Struct]:
    others = [(field, kind | msgspec.UnsetType, msgspec.UNSET) for field, kind in optional.items()]
    return msgspec.defstruct(name, [*fields.items(), *others], kw_only=True)


TrainerPart = _document("TrainerPart", _OF_PROCESS | _OF_TRAINER, _ALSO_OF_TRAINER)
CourierPart = _document("CourierPart", _OF_PROCESS | _OF_COURIER, _ALSO_OF_COURIER | {"unrestorable_at": _Number})
_Rank = _document(
    "Rank", _OF_BOTH | _OF_TRAINER | _OF_COURIER | {"pid": Annotated[int, Meta(ge=0, le=1 << 62)], "alive": bool},
    _ALSO_OF_TRAINER | _ALSO_OF_COURIER | _ABOUT_COURIER,
)  # fmt: skip
_TRAINER_FIELDS = (*_OF_BOTH, "pid", *_OF_TRAINER, *_ALSO_OF_TRAINER)
_COURIER_FIELDS = (*_OF_COURIER, *_ALSO_OF_COURIER)
# With these fields the next courier of this trainer continues.
_CONTINUED_FIELDS = (
    "committed", "committed_at", "drained", "saves", "failed", "damaged", "unrestorable", "unrestorable_at", "suspect",
    "certified", "times",
)  # fmt: skip


def encode(report: Mapping[str, Any]) -> bytes:
    """Encode what a process reports; never longer than a part, because the other one begins there."""
    text = json.dumps(report, separators=(",", ":")).encode()
    if len(text) > PART_NBYTES:
        short = {name: value[-_SHORT:] if isinstance(value, str) else value for name, value in report.items()}
        text = json.dumps(short, separators=(",", ":")).encode()
    return text.ljust(PART_NBYTES)[:PART_NBYTES]


def read_part(text: bytes, kind: type[msgspec.Struct]) -> dict[str, Any] | str | None:
    """Read a `TrainerPart` or a `CourierPart`, or return why it cannot be read; None if it is blank."""
    if not text.strip(b"\0 "):  # the process has just made it
        return None
    try:
        report = json.loads(text)
    except (ValueError, RecursionError):
        return "cannot be read: it is torn, or no heartbeat"
    return _checked(report, kind)


def why_unread(report: object) -> str:
    """Why what a rank reports (see `combined`) cannot be read; "" if it can."""
    checked = _checked(report, _Rank)
    return checked if isinstance(checked, str) else ""


def _checked(document: object, kind: type[msgspec.Struct]) -> dict[str, Any] | str:
    try:
        known: dict[str, Any] = msgspec.to_builtins(msgspec.convert(document, kind))
        if known.get("restored") is None or "restored" in known["times"]:
            return known
        wrong = "the time of the restore is missing"
    except (msgspec.ValidationError, UnicodeError) as error:
        wrong = str(error)
    version = str(document.get("version", "unknown"))[:_SHORT] if isinstance(document, dict) else "unknown"
    return f"cannot be read: written by version {version} (this is {__version__}): {wrong}"


def combined(trainer: Mapping[str, Any], courier: Mapping[str, Any] | None, alive: bool, courier_alive: bool
             ) -> dict[str, Any]:  # fmt: skip
    """Combine what the trainer and the courier of a rank report: only the trainer decides its life and its progress.

    The courier's part is left out if it belongs to another start. Its process is described by ``courier_pid``,
    ``courier_alive``, ``courier_beat`` and ``courier_state``, None if nothing is known. A pid is 0 if the process has
    another pid namespace than who reads: it counts as alive.
    """
    report: dict[str, Any] = {name: trainer[name] for name in _TRAINER_FIELDS if name in trainer}
    report |= {"committed": None, "alive": alive, **dict.fromkeys(_ABOUT_COURIER)}
    if courier is None or (courier["start"], courier["rank"]) != (trainer["start"], trainer["rank"]):
        return report
    report |= {name: courier[name] for name in _COURIER_FIELDS if name in courier}
    report |= {"courier_pid": courier["pid"], "courier_alive": courier_alive, "courier_beat": courier["beat"],
             "courier_state": courier["state"], "times": courier["times"] | trainer["times"]}  # fmt: skip
    if trainer.get("restored_at", 0) >= courier.get("unrestorable_at", 0):
        report.pop("unrestorable", None)  # another checkpoint could be restored since
    return report


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


@dataclasses.dataclass(frozen=True)
class RankFacts:
    """The rank that a heartbeat belongs to: plain values, which the trainer makes and sends to its courier.

    ``start`` identifies this trainer and its Checkpointer: what couriers of others have left is passed over.
    """

    rank: int
    size: int
    local_rank: int
    node: str
    run: str
    start: str = dataclasses.field(default_factory=lambda: os.urandom(8).hex())


class _Part:
    def __init__(self, memory: NodeDirectory, facts: RankFacts, at: int, is_written: bool):
        self._lock = threading.Lock()  # any thread of the process writes
        self._fd, self._at = _open(memory, f"pulse-{facts.local_rank:04d}") if is_written else -1, at
        self._over = False
        self._report: dict[str, Any] = {
            "format": 1, "version": __version__, "start": facts.start, "rank": facts.rank, "pid": os.getpid(),
            "pid_namespace": _pid_namespace(), "state": "started", "times": {},
        }  # fmt: skip
        if facts.run:
            faulthandler.register(SHOW_STACKS, sys.__stderr__ or 2)

    @property
    def is_over(self) -> bool:
        return self._over

    def note(self, **news: Any) -> None:
        with self._lock:
            self._report.update(_short(news))

    def beat(self, event: str = "", **news: Any) -> None:
        """Report that this process makes progress, and what is new; the first time of each event stays."""
        with self._lock:
            if self._fd < 0:
                return
            now = round(time.time(), 3)
            if event:
                self._report["times"].setdefault(event, now)
            self._report.update(_short(news), beat=now)
            self._write()

    def _write(self) -> None:
        text = encode(self._report)
        # No `try` here: CPython does not release a lock if an exception is raised on exactly that line, as in the
        # tests.
        with contextlib.suppress(OSError):  # memory is full, which `_open` has reported
            os.pwrite(self._fd, text, self._at)

    def _close(self) -> None:
        with self._lock:
            self.leave()

    def leave(self) -> None:
        """Write nothing from now on. It takes no lock, which a thread of the parent may hold in a forked process."""
        fd, self._fd, self._over = self._fd, -1, True
        if fd >= 0:
            os.close(fd)


class TrainerHeartbeat(_Part):
    """The heartbeat of this rank's trainer: its beat is the progress of the training.

    With ``is_written=False`` the file of a dead job stays as it is: a command opens its memory.
    """

    def __init__(self, memory: NodeDirectory, facts: RankFacts, is_written: bool = True):
        super().__init__(memory, facts, 0, is_written)
        self._report |= {"run": facts.run, "ranks": facts.size, "node": facts.node, "restored": None, "source": "",
                       "saved": None}  # fmt: skip
        self.beat("made")

    def flush(self) -> None:
        """Write what was noted, with the time of the last beat: only training itself makes progress."""
        with self._lock:
            if self._fd >= 0:
                self._write()

    def end(self, state: str) -> None:
        self.beat(state, state=state)
        self._close()


class CourierHeartbeat(_Part):
    """The heartbeat of this rank's courier; it continues when the trainer is dead.

    A courier that replaces another one of the same trainer continues from what that one has reported.
    """

    def __init__(self, memory: NodeDirectory, facts: RankFacts, is_written: bool = True):
        super().__init__(memory, facts, PART_NBYTES, is_written)
        self.before: dict[str, Any] = {}
        with contextlib.suppress(OSError):  # there is no part, or it could not be opened
            before = read_part(os.pread(self._fd, PART_NBYTES, self._at), CourierPart)
            if isinstance(before, dict) and (before["start"], before["rank"]) == (facts.start, facts.rank):
                self.before = {name: before[name] for name in _CONTINUED_FIELDS if name in before}
        self._report |= {"committed": None, "saves": 0, "failed": 0} | self.before
        self.beat()

    def end(self) -> None:
        self.beat(state="ended")
        self._close()


def _open(memory: NodeDirectory, name: str) -> int:
    """Open the file of a rank, with room for everything it will contain; -1 if that fails: training continues."""
    try:
        fd = memory.open(name, os.O_RDWR | os.O_CREAT)
    except UnsafePath as error:
        log.warning("this rank cannot report its progress to mlflash run and mlflash top: %s", error)
        return -1
    try:
        os.posix_fallocate(fd, 0, 2 * PART_NBYTES)
    except OSError as error:
        log.warning("this rank cannot report its progress to mlflash run and mlflash top while %s is full: %s",
                    memory.path, error)  # fmt: skip
    return fd


def _short(news: dict[str, Any]) -> dict[str, Any]:
    """Shorten values so that everything has room: times to the microsecond, the last letters of long paths."""
    return {
        name: round(value, 6) if isinstance(value, float) else value[-_LETTERS:] if isinstance(value, str) else value
        for name, value in news.items()
    }


class NodeReports(NamedTuple):
    """What the ranks of a node report about themselves; and, in words, why other files cannot be read."""

    heartbeats: list[dict[str, Any]]
    unread: list[str]


def read_heartbeats(memory: str, job: str) -> NodeReports:
    """Read what the ranks of this node report, and whether each is alive; nothing if the job has no memory there."""
    try:
        held = NodeDirectory(memory, job, make=False)
    except FileNotFoundError:
        return NodeReports([], [])
    try:
        reports = NodeReports([], [])
        for name in held.pulse_names():
            report, unread = read_heartbeat(held, name)
            reports.unread.extend(f"{held.path}/{name} {text}" for text in unread)
            if report is not None:
                reports.heartbeats.append(report)
        return reports
    finally:
        held.close()


def live_jobs(memory: str) -> list[str]:
    """List the jobs of this user that are alive on this node, even if only a courier without its trainer is."""
    return [
        job
        for job in jobs_of(memory)
        if any(report["alive"] or is_orphan(report) for report in read_heartbeats(memory, job).heartbeats)
    ]


def _pid_namespace() -> int:
    """The number of this process's pid namespace: the same pid in another one is another process."""
    return os.stat("/proc/self/ns/pid").st_ino


def _pid_here(part: dict[str, Any]) -> int:
    return int(part["pid"]) if part["pid_namespace"] == _pid_namespace() else 0


def _is_alive(pid: int) -> bool:
    if pid == 0:  # of another container: nothing is known of it
        return True
    try:
        return read_stat(pid).state not in ("Z", "X")
    except OSError:
        return False


def _read_parts(fd: int) -> tuple[dict[str, Any] | str | None, ...]:
    text = b""
    for _ in range(_READS):
        before, text = text, os.pread(fd, 2 * PART_NBYTES, 0)
        parts = _parts_of(text) if text == before else ("",)
        if not any(isinstance(part, str) for part in parts):
            return parts
    return _parts_of(text)


def _parts_of(text: bytes) -> tuple[dict[str, Any] | str | None, ...]:
    return read_part(text[:PART_NBYTES], TrainerPart), read_part(text[PART_NBYTES:], CourierPart)


def read_heartbeat(memory: NodeDirectory, name: str) -> tuple[dict[str, Any] | None, list[str]]:
    """Read what the trainer and the courier of some rank report, `combined`, and in words, why parts cannot be read.

    Nothing is reported if the trainer's part is missing, blank, or cannot be read.
    """
    try:
        fd = memory.open(name, os.O_RDONLY)
    except FileNotFoundError:
        return None, []
    except (UnsafePath, OSError) as error:
        return None, [f"cannot be read: {error}"]
    try:
        trainer, courier = _read_parts(fd)
    except OSError as error:
        return None, [f"cannot be read: {error.strerror}"]
    finally:
        os.close(fd)
    if not isinstance(trainer, dict):
        return None, [] if trainer is None else [trainer]
    unread = [f"{courier} in what the courier says"] if isinstance(courier, str) else []
    of_courier = courier if isinstance(courier, dict) else None
    for part in (trainer, of_courier):
        if part is not None:
            part["pid"] = _pid_here(part)
    courier_alive = of_courier is not None and _is_alive(of_courier["pid"])
    return combined(trainer, of_courier, _is_alive(trainer["pid"]), courier_alive), unread
