"""Kill the trainer of this rank with all that it has started, as Slurm does where cgroups know all that a step runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

from processes import started_by

file = Path(os.environ["OUT"], f"rank{os.environ['SLURM_PROCID']}.jsonl")
trainer = json.loads(file.read_text().splitlines()[0])["pid"]
for pid in {trainer, *started_by({trainer})}:
    with contextlib.suppress(ProcessLookupError):  # it ended by itself when the other rank did
        os.kill(pid, signal.SIGKILL)
