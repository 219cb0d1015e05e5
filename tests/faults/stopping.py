"""Stop ranks, and know that they have, or that they wait."""

from __future__ import annotations

import signal
from pathlib import Path

from harness import Launch
from processes import runs, state
from waiting import until


def stop(job: Launch, rank: int) -> None:
    """Stop a rank of a job; when this returns none of its threads runs any more."""
    job.signal([rank], signal.SIGSTOP)
    pid = job.pids()[rank]
    until(lambda: not runs(pid), f"rank {rank} to stop")


def sleeps(pid: int) -> bool:
    """Whether the main thread of a process waits for something just now."""
    return state(Path(f"/proc/{pid}/task/{pid}/stat")) == "S"
