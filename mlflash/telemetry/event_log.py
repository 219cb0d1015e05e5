"""What happens to a rank, as lines of JSON in a file; docs/watching.md describes each kind.

A separate thread opens the file and writes: a parallel file system that hangs delays neither training nor saves.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any

log = logging.getLogger("mlflash")

_WAITING = 10_000  # events that may wait to be written; further ones are only counted
_CLOSE_S = 2.0  # to write the remaining events at the end


class EventLog:
    """The events of this rank; not collective.

    Every warning that is logged is an event, too, until `close`.

    Args:
        path: the file of this node, see `file_of_node`; None: nothing is written.
        common: fields of each event: run, rank and node. ``by="courier"`` for a courier that is a separate process,
            whose warnings are also its trainer's.
    """

    def __init__(self, path: str | None, **common: Any):
        self._path, self._common = path, common
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # in C: no exception leaves it locked
        self._dropped = 0
        self._thread: threading.Thread | None = None
        if path is not None:
            self._thread = threading.Thread(target=self._write, name="mlflash-events", daemon=True)
            self._thread.start()
            if "by" not in common:
                log.addFilter(self._see)

    @property
    def is_on(self) -> bool:
        """Whether anything is written."""
        return self._thread is not None

    def add(self, event: str, **fields: Any) -> None:
        """Note an event that has just ended; return at once."""
        if self._thread is None:
            return
        document = {"event": event, "time": time.time(), **self._common, **fields}
        document = {name: round(value, 6) if isinstance(value, float) else value for name, value in document.items()}
        if self._lines.qsize() < _WAITING:
            self._lines.put(json.dumps(document, separators=(",", ":"), default=str) + "\n")
        else:
            self._dropped += 1

    def close(self) -> None:
        """Wait a moment until everything is written. May be called twice."""
        if self._thread is None:
            return
        log.removeFilter(self._see)
        self._lines.put(None)
        self._thread.join(_CLOSE_S)  # if the file system hangs, the thread ends with the process
        self._thread = None

    def leave(self) -> None:
        """Write nothing in a forked process: the thread belongs to the parent, and may hold the queue's lock."""
        log.removeFilter(self._see)
        self._thread = None

    def _see(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            self.add("warning", level=record.levelname, text=record.getMessage())
        return True

    def _write(self) -> None:
        try:
            assert self._path is not None
            Path(self._path).parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                while (lines := self._next()) is not None:
                    _write_whole(fd, lines)
            finally:
                os.close(fd)
        except OSError as error:
            log.removeFilter(self._see)
            log.warning("events are not written any more, to %s: %s", self._path, error)

    def _next(self) -> bytes | None:
        """What must be written at once; None at the end."""
        lines = [self._lines.get()]
        while lines[-1] is not None and not self._lines.empty():
            lines.append(self._lines.get())
        if lines == [None]:
            return None
        if lines[-1] is None:
            self._lines.put(None)
        dropped, self._dropped = self._dropped, 0
        if dropped:
            text = f"{dropped} events are missing: they came faster than they could be written"
            self.add("warning", level="WARNING", text=text)
        return "".join(line for line in lines if line is not None).encode()


def _write_whole(fd: int, lines: bytes) -> None:
    """Write each line in one write, because ranks of one node, and their couriers, append to one file.

    If only a part was written, the line that was cut is written once more, whole: another process may have written in
    between.
    """
    while lines:
        taken = os.write(fd, lines)
        whole = lines.rfind(b"\n", 0, taken) + 1
        # If a write does not even take one line, repeating that line never succeeds: continue with the rest of it.
        is_cut = 1 < whole < taken < len(lines) and lines[taken : taken + 1] != b"\n"
        lines = b"\n" + lines[whole:] if is_cut else lines[taken:]


def file_of_node(path: str, node_index: int) -> str:
    """Name the file that the ranks of a node append to: nodes must not append to one file of a shared file system.

    Example:
        ``run.jsonl`` is that of the first node, ``run.node1.jsonl`` that of the second.
    """
    stem, suffix = os.path.splitext(path)
    return path if node_index == 0 else f"{stem}.node{node_index}{suffix}"
