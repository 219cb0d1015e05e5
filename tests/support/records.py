"""What the ranks of a job write down for the test that started them: lines of JSON, a file for each rank in $OUT."""

from __future__ import annotations

import atexit
import json
import os
import sys
from pathlib import Path

OUT = Path(os.environ["OUT"])


def note(event: str, rank: int | None = None, **fields: object) -> None:
    """Write one record, so that it is there even if this process is killed in the next instant."""
    if rank is None:
        dist = sys.modules["torch.distributed"]
        rank = dist.get_rank() if dist.is_initialized() else 0
    with (OUT / f"rank{rank}.jsonl").open("a") as file:
        file.write(json.dumps({"event": event, "rank": rank, "pid": os.getpid(), **fields}) + "\n")


@atexit.register
def _note_libraries() -> None:
    """Note whether this process has ever loaded MPI, which only its courier is to do."""
    note("libraries", rank=int(os.environ.get("RANK", "0")), mpi="libmpi" in Path("/proc/self/maps").read_text())
