"""Reads again the files that this rank has drained, and compares each block with what was written."""

from __future__ import annotations

from ..draining.checkpoint_directory import Listed
from ..draining.drain import Drain
from ..draining.file_index import Card
from ..errors import MlflashError, text_of
from ..events import Event
from .drained_files import DrainedFiles

_RUN_NBYTES = 4 << 20  # per read; at least a block


def why_damaged(drain: Drain, rate: float, over: Event) -> list[tuple[int, str, str]]:
    """Read every block of what this rank has drained, except what HDF5 has compressed.

    Not collective; for a thread that may hang.

    Args:
        drain: a drain that has ended well.
        rate: bytes per second.
        over: set if the result is not needed any more.

    Returns:
        For each file that is damaged or cannot be read: the rank whose state it has, its name, and why.
    """
    assert drain.inside is not None and drain.attempt is not None
    card = Card(drain.attempt, drain.step, -1, 0, 0, 0, 0, 0, 0, "")
    files = DrainedFiles(drain.inside, Listed("", "", card), drain.stored)
    found = []
    for rank, stored in drain.stored.items():
        try:
            for entry, place in files.index(rank).pieces:
                if place.packed:  # skipped: HDF5 would hold its lock while a file system hangs
                    continue
                for raw in files.content(rank, entry.name, place, _RUN_NBYTES):
                    if over.wait(raw.nbytes / rate):
                        return []
        except MlflashError as error:
            found.append((rank, stored.data, error.message))
        except Exception as error:  # fsspec may raise anything
            found.append((rank, stored.data, text_of(error)))
    return found
