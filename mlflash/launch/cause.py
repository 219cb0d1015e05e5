"""Why a rank failed, as its exit code, its last lines of stderr and the kernel show, and whether a restart helps. Pure.

A rank may fail only because another rank failed: then it has lost its connection. Such a cause counts only if there is
no other one (`Cause.follows`).
"""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Sequence
from typing import Any

PROGNOSES = {
    "killed": "the signal came from outside of the training",
    "out of memory": "the next start may need less memory",
    "device out of memory": "the next start may need less memory",
    "device": "other GPUs may be whole",
    "nccl": "new connections may hold",
    "peer": "new connections may hold",
    "error": "the error may not come again",
    "crash": "the crash may not come again",
    "exit": "it may not come again",
    "hang": "it may not hang again",
    "node": "the training is not to blame",
}
"""The kinds of causes, and why the next start may not fail in the same way."""
_REPEATED = ("error", "out of memory", "device out of memory")
_FOLLOWING = ("nccl", "peer")
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS)
_LONGEST = 300  # characters of a text or of evidence
_RECENT = 4096  # characters at the end of stderr. An exception before them has ended no process, if its code is not 1

# Xids for which NVIDIA asks to drain the node or to reset the GPU. Programs cause the others, or nothing is lost.
_XIDS = {46, 48, 61, 62, 64, 74, 79, 94, 95, 109, 110, 119, 120, 136, 140, 143, 149, 155, 156, 158}
_XID = re.compile(r"NVRM: Xid \([^)]*\): (\d+),?.*")
_OF_GPUS = re.compile(r"CUDA|cuda|NCCL|nccl|cuDNN|CUDNN|CUBLAS|NVML")
_DEVICE = re.compile(r"uncorrectable (?:ECC|NVLink) error|fallen off the bus|GPU is lost")
_DEVICE_MEMORY = re.compile(
    r"(?:CUDA|HIP|XPU) out of memory|CUDA error: out of memory|_STATUS_ALLOC_FAILED|RESOURCE_EXHAUSTED: Out of memory"
)
_HOST_MEMORY = re.compile(r"^(?:[\w.]*\.)?_?(?:Array)?MemoryError\b|[Cc]an(?:not|'t) allocate memory")
_NCCL = re.compile(r"NCCL error|NCCL watchdog|ncclRemoteError|Watchdog caught collective operation timeout")
_NCCL_MISUSED = re.compile(r"invalid usage|invalid argument", re.IGNORECASE)
_PEER = re.compile(
    r"Connection (?:reset|closed) by peer|Broken pipe|ConnectionResetError|BrokenPipeError|DistNetworkError|RoundOver|"
    r"DeadlineExceeded|rank \d+ has left the job"
)
_OTHER_RANK = re.compile(r"mlflash: rank \d+ ends, as all ranks do|; this rank ends, too")  # what mlflash prints then
_WORKER_KILLED = re.compile(r"killed by signal: Killed")  # torch's DataLoader, of one of its processes
_CRASHED = re.compile(r"what\(\):|Fatal Python error|Assertion .*failed|free\(\)|stack smashing")

_RANK_PREFIX = re.compile(r"^\[rank\d+\]:? ?", re.MULTILINE)  # torch prints it in front of each line
_FRAME = re.compile(r'  File "(.*)", line (\d+)(?:, in (.*))?')
_LIBRARIES = re.compile(r"/(?:site|dist)-packages/|/lib/python3|^<frozen")
_ERROR = re.compile(r"(?:\w+\.)*[A-Z]\w*(?:Error|Exception)\b(?::.*)?$")


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why a rank or a start failed.

    Attributes:
        kind: one of `PROGNOSES`.
        text: what failed.
        evidence: what shows it: a line of stderr or of the kernel's log, or where an exception was raised.
        rank, host: where; None and "": nowhere in particular.
    """

    kind: str
    text: str
    evidence: str = ""
    rank: int | None = None
    host: str = ""

    @property
    def reason(self) -> str:
        """Text and evidence."""
        return f"{self.text} [{self.evidence}]" if self.evidence else self.text

    def __str__(self) -> str:
        return self.reason if self.rank is None else f"rank {self.rank} on {self.host}: {self.reason}"

    @property
    def follows(self) -> bool:
        """Whether another rank or the network probably failed first."""
        return self.kind in _FOLLOWING

    def is_again(self, before: Cause | None) -> bool:
        """Whether this error came before, and would come each time. Numbers and addresses in it may differ."""
        if before is None or self.kind != before.kind or self.kind not in _REPEATED:
            return False
        return self.kind != "error" or _without_numbers(self.reason) == _without_numbers(before.reason)

    @property
    def fields(self) -> dict[str, Any]:
        """It as JSON."""
        return dataclasses.asdict(self)


def _without_numbers(text: str) -> str:
    return re.sub(r"[\w.]*\d[\w.]*", "#", text)


@dataclasses.dataclass(frozen=True)
class _Exception:
    """The last exception in stderr: its first line, where it was raised, and whether that was at the end."""

    line: str
    raised_at: str
    is_last: bool


def cause_of(code: int, stderr: str = "", sender: str = "", oom_kills: int | None = None, kernel: Sequence[str] = (),
             pid: int = 0) -> Cause:  # fmt: skip
    """Find why a process failed.

    Args:
        code: its exit code as in a shell.
        stderr: the last of it.
        sender: who of `mlflash run` has sent a signal that ends it; "": nobody.
        oom_kills: how many processes of its cgroup the kernel has killed meanwhile for lack of memory; None: unknown.
        kernel: lines of the kernel's log since it was started.
    """
    number, error = code - 128 if 128 < code < 128 + signal.NSIG else 0, _last_exception(stderr)
    if error is not None and not (code == 1 or (error.is_last and (sender or number in _CRASHES or not number))):
        error = None
    last = stderr[-_RECENT:]
    said = last if error is None else error.line
    if (evidence := _out_of_memory(number, last, oom_kills, kernel, pid)) is not None:
        return Cause("out of memory", "the kernel killed it because memory was used up", evidence)
    if number and number not in _CRASHES and error is None:
        unknown = "by whom is unknown" if number == signal.SIGKILL and oom_kills is None else "from outside"
        return Cause("killed", f"its process was killed by signal {number}", f"from {sender}" if sender else unknown)
    if line := _line_with(_OTHER_RANK, last):
        return Cause("peer", "it ended because of another rank", line)
    xids = [line for line in kernel if (match := _XID.search(line)) is not None and int(match[1]) in _XIDS]
    if xids and (number in _CRASHES or _OF_GPUS.search(said)):
        return Cause("device", "a GPU of its node failed", _short(xids[0]))
    for kind, pattern in (("device", _DEVICE), ("device out of memory", _DEVICE_MEMORY), ("nccl", _NCCL),
                          ("peer", _PEER), ("out of memory", _HOST_MEMORY)):  # fmt: skip
        is_watchdog = kind == "nccl" and number in _CRASHES and error is None  # which prints long stacks after it
        line = _line_with(pattern, stderr if is_watchdog else said)
        if line and not (kind == "nccl" and _NCCL_MISUSED.search(line)):
            return Cause(kind, line, "" if error is None else error.raised_at)
    if error is not None:
        return Cause("error", _short(error.line), error.raised_at)
    if number in _CRASHES:
        name = signal.Signals(number).name
        return Cause("crash", f"its process crashed ({name})", _line_with(_CRASHED, stderr) or _last_line(stderr))
    return Cause("exit", f"its process ended with code {code}", _last_line(stderr))


def _out_of_memory(number: int, last: str, oom_kills: int | None, kernel: Sequence[str], pid: int) -> str | None:
    """What shows that the kernel killed a process, or a worker that it needs, for lack of memory; None: nothing."""
    if number == signal.SIGKILL:
        killed = [line for line in kernel if f"Killed process {pid} " in line and "ut of memory" in line]
        if killed:
            return _short(killed[0])
    elif not _WORKER_KILLED.search(last):
        return None
    return f"oom_kill of its cgroup rose by {oom_kills}" if oom_kills else None


def _last_exception(stderr: str) -> _Exception | None:
    """The exception that was printed last, as Python prints those that nothing catches."""
    text = _RANK_PREFIX.sub("", stderr)
    lines = text.splitlines()
    begins = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if begins:
        ends = [number for number, line in enumerate(lines) if number > begins[-1] and line[:1].strip()][:1]
    else:  # a syntax error has no such line, and a long traceback may have lost it
        ends = [number for number, line in enumerate(lines) if _ERROR.match(line)]
    if not ends or lines[ends[-1]].startswith(("KeyboardInterrupt", "SystemExit")):
        return None
    end = ends[-1]
    frames = [match for line in lines[begins[-1] if begins else 0 : end] if (match := _FRAME.match(line)) is not None]
    own = [frame for frame in frames if not _LIBRARIES.search(frame[1])]
    at = "".join(f"{file}:{line}" + (f" in {name}" if name else "") for file, line, name in
                 (frame.groups() for frame in (own or frames)[-1:]))  # fmt: skip
    return _Exception(lines[end], at, sum(len(line) + 1 for line in lines[end:]) <= _RECENT)


def _line_with(pattern: re.Pattern[str], text: str) -> str:
    """The first line that a pattern is in; "" if it is in none."""
    return next((_short(line) for line in text.splitlines() if pattern.search(line)), "")


def _last_line(text: str) -> str:
    return next((_short(line) for line in reversed(text.splitlines()) if line.strip()), "")


def _short(line: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in line.strip())[:_LONGEST]
