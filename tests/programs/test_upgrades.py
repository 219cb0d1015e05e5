"""What earlier versions have drained is read by this one, bit for bit: docs/releases.md promises it."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

WRITTEN = Path(__file__).with_name("written_by")
READ = """
import sys, numpy as np, torch, mlflash
half = torch.arange(7).to(torch.bfloat16)
state = {"model": {"w": torch.arange(1000.0), "half": half, "empty": torch.zeros(0, 3)}, "step": 12,
         "array": np.arange(12, dtype=">i4").reshape(3, 4), "names": ["a", None, True], "nested": {"t": (1, 2.5)}}
folder, memory, written = sys.argv[1:]
with mlflash.Checkpointer(folder, job="job", memory=memory, redundancy="none", drain_every=1, format=written) as ckpt:
    if not ckpt.steps():
        ckpt.save(12, state).wait()  # this is how the files were made
    step, read = ckpt.load()
assert step == 12 and read.keys() == state.keys(), read
tensors = read.pop("model")
for name, tensor in state.pop("model").items():
    assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor), name
array = read.pop("array")
assert array.dtype == state["array"].dtype and np.array_equal(array, state.pop("array"))
assert repr(read) == repr(state), read
"""


@pytest.mark.parametrize("written", ["dcp", "hdf5"])
@pytest.mark.parametrize("version", ["0.2.0"])
def test_what_an_earlier_version_has_drained_is_read(version: str, written: str, tmp_path: Path) -> None:
    folder, memory = tmp_path / "directory", tmp_path / "memory"
    memory.mkdir()
    with tarfile.open(WRITTEN / f"{version}-{written}.tar") as archive:
        archive.extractall(folder, filter="data")
    command = [sys.executable, "-c", READ, folder, memory, written]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in folder.iterdir()] == ["step-00000012"]
