"""Stop ranks, and know that they have, or that they wait."""

from __future__ import annotations

import signal
from pathlib import Path

from harness import Launch
from waiting import until


def stop(job: Launch, rank: int) -> None:
    """Stop a rank of a job; when this returns none of its threads runs any more."""
    job.signal([rank], signal.SIGSTOP)
    pid = job.pids()[rank]
    until(lambda: set(_states(pid)) == {"T"}, lambda: f"rank {rank} to stop: {_states(pid)}")


def sleeps(pid: int) -> bool:
    """Whether the main thread of a process waits for something just now."""
    return _state(Path(f"/proc/{pid}/task/{pid}/stat")) == "S"


def _states(pid: int) -> list[str]:
    """What each thread of a process is about, as the kernel says."""
    return [_state(file) for file in Path(f"/proc/{pid}/task").glob("*/stat")]


def _state(file: Path) -> str:
    return file.read_text().rsplit(")", 1)[1].split()[0]
