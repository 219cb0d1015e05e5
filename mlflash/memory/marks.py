"""Writes a user's verdict on a step into the files of a node that hold the step."""

from __future__ import annotations

import os
import time

from ..errors import CorruptSlot
from .inventory import first_pages
from .node_directory import NodeDirectory
from .slot_header import VERDICT_START, Attempt, Verdict, pack_record, unpack


def mark(memory: NodeDirectory, step: int, verdict: Verdict) -> set[Attempt]:
    """Write a verdict into all sealed files of this node that hold a step; return the attempts that they hold.

    A live job may write such a file at the same time: then the record belongs to an attempt that is no
    longer in the file, and has no effect.
    """
    found = set()
    for name, page, _ in first_pages(memory):
        try:
            header = unpack(page)
        except CorruptSlot:
            continue
        if header.step != step:
            continue
        found.add(header.attempt)
        try:
            fd = memory.open(name, os.O_RDWR)
        except FileNotFoundError:
            continue
        try:
            os.pwrite(fd, pack_record(VERDICT_START, header.attempt, verdict, time.time_ns()), VERDICT_START)
        finally:
            os.close(fd)
    return found
