"""What others have left in a node's memory is named: by the error that there is no room, and by `mlflash doctor`."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from mlflash import Checkpointer, errors
from mlflash.config import from_environment
from mlflash.launch.launcher_variables import launched
from mlflash.memory.memory_limits import mapped_files, other_files
from mlflash.tools.doctor_checks import left_over, room
from mlflash.tools.doctor_findings import Context, Level

MIB = 1 << 20
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root: mounts a file system, gives files away")


def test_files_are_told_apart_by_how_their_names_begin_and_by_whether_they_are_mapped(tmp_path: Path) -> None:
    assert other_files(str(tmp_path)) == []
    for name, nbytes in (("nccl-AbCdEf", 5 * MIB), ("nccl-qwerty", 3 * MIB), ("torch_12_34", MIB), ("plain", 8192)):
        (tmp_path / name).write_bytes(bytes(nbytes))
    (tmp_path / "empty-1").touch()
    (tmp_path / "cmx" / "deep").mkdir(parents=True)
    (tmp_path / "cmx" / "deep" / "file").write_bytes(bytes(2 * MIB))
    (tmp_path / "link").symlink_to("/")
    (tmp_path / f"mlflash-{os.getuid()}").mkdir(mode=0o700)
    (tmp_path / f"mlflash-{os.getuid()}" / "slot").write_bytes(bytes(9 * MIB))
    with open(tmp_path / "nccl-AbCdEf", "r+b") as file, mmap.mmap(file.fileno(), 0):
        mapped = mapped_files(str(tmp_path))
        found = [(one.name, one.uid, one.count, one.nbytes, one.unmapped(mapped)) for one in other_files(str(tmp_path))]
    me = os.getuid()
    assert found == [("nccl-*", me, 2, 8 * MIB, 1), ("cmx", me, 1, 2 * MIB, 0), ("torch_*", me, 1, MIB, 1),
                     ("plain", me, 1, 8192, 1)]  # fmt: skip


@needs_root
def test_where_slots_do_not_fit_the_largest_files_of_others_are_named(small: Path) -> None:
    """llm-d/llm-d#352: hundreds of files of killed jobs filled /dev/shm, and nothing said so."""
    for number in range(40):
        (small / f"nccl-{number:06}").write_bytes(bytes(MIB))
    (small / "cmx000").write_bytes(bytes(5 * MIB))
    os.chown(small / "cmx000", 54321, 54321)
    with Checkpointer(memory=str(small), redundancy="none", job="j") as ckpt:
        with pytest.raises(errors.MemoryTooSmall) as refused:
            ckpt.prepare({"w": np.zeros(16 * MIB, np.uint8)})
        said = str(refused.value)
        assert f"nccl-* of user root: {40 * MIB:,} bytes in 40 files" in said
        assert f"cmx000 of user 54321: {5 * MIB:,} bytes in 1 files" in said
        for path in small.glob("nccl-*"):
            path.unlink()
        ckpt.save(1, {"w": np.zeros(16 * MIB, np.uint8)}).wait()


@needs_root
def test_the_doctor_warns_of_large_files_that_nobody_has_mapped(small: Path) -> None:
    here = Context(from_environment({}, None, job="any", memory=str(small)), {}, launched({}))
    assert next(iter(room(here))).fill("{size_nbytes}") == "64 MiB", "as of Docker, which is little"
    assert not list(left_over(here))
    (small / "nccl-{0}").write_bytes(bytes(20 * MIB))
    (found,) = left_over(here)
    assert found.level is Level.WARNING and "1 of 1 files nccl-* of user root" in found.fill(found.text)
    with open(small / "nccl-{0}", "r+b") as file, mmap.mmap(file.fileno(), 0):
        assert not list(left_over(here))
