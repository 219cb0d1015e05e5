"""A disk that fails when a slot file is made, and one that is slower than saves come."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import until

from mlflash.memory import disk_slot
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


@pytest.mark.parametrize(("takes_s", "times"), [(7.0, 0), (9.0, 1)])
def test_a_disk_that_saves_are_too_fast_for_is_said_once(
    shm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, takes_s: float, times: int
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(disk_slot, "time", SimpleNamespace(perf_counter=lambda: now_s))
    directory = NodeDirectory(str(shm), "t")
    disk = Disk(directory)
    for _ in range(6):  # one save in ten seconds
        begun_s = now_s
        with disk.writing():  # two writers, of which the second one ends later
            with disk.writing():
                now_s += takes_s / 2
            now_s += takes_s / 2
        disk.saved(begun_s)
        now_s = begun_s + 10
    said = "is written for 9 s in each save, and saves come every 10 s: training waits for this disk"
    assert caplog.text.count(said) == times == caplog.text.count("It can do one every")
    directory.close()
