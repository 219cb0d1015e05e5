"""``run.jsonl``: one line for each event of a run, for programs and for people."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


class RunLog:
    """Adds lines to a file. A file that cannot be written does not stop a run.

    Args:
        path: of the file; None: nothing is written.
    """

    def __init__(self, path: Path | None):
        self._path = path

    def note(self, event: str, **fields: Any) -> None:
        """Add a line with an event, its time (Unix time) and its fields."""
        if self._path is None:
            return
        line = json.dumps({"time": round(time.time(), 3), "event": event, **fields})
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(line + "\n")
        except OSError:
            self._path = None
