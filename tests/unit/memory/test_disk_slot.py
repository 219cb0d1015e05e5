"""A disk that fails when a slot file is made: the slot stays empty, and nobody gets an exception."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from mlflash.memory.disk_slot import Disk, DiskSlot
from mlflash.memory.node_directory import NodeDirectory
from mlflash.state.layout import Extents


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_file_that_cannot_be_made_fails_the_disk_and_nothing_else(
    shm: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    directory = NodeDirectory(str(shm), "t")
    disk, really = Disk(directory), os.open

    def fails(path: Any, flags: int, *more: Any, **how: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(number, os.strerror(number))
        return really(path, flags, *more, **how)

    slot = DiskSlot(disk)
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", fails)
        slot.unseal()
    assert disk.problem
    incoming = slot.incoming(Extents(4096, 4096, 4096))
    incoming.end()
    until(lambda: incoming.is_good is not None, "the writer to end")
    assert incoming.is_good is False and slot.header is None and slot.stored_header() is None
    directory.close()
