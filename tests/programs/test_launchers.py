"""Launchers without MPI on one host: README's example under torchrun, and each way to set RANK and WORLD_SIZE.

Nodes that are apart are in tests/cluster/test_launchers.py, frameworks in tests/frameworks/test_contract.py.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import needs
import pytest
from harness import LAUNCHERS, SUPPORT, TESTS, PlainRanks
from processes import left_here, plain_environment
from waiting import PATIENCE_S, until

REPO = TESTS.parent
pytestmark = needs.MPI


def environment(shm: Path, **more: object) -> dict[str, str]:
    return plain_environment(MLFLASH_MEMORY=shm, OUT=shm, OMP_NUM_THREADS=1, **more)


@pytest.mark.parametrize("page", [pytest.param("README.md", marks=pytest.mark.gate), "docs/fsdp.md"])
def test_the_example_of_the_readme_is_killed_under_torchrun_and_goes_on(page: str, shm: Path, tmp_path: Path) -> None:
    """In an empty directory, as it stands, with two lines in addition: to say where it begins, and to kill a rank."""
    example = re.search(r"```python\n(.*?)```", (REPO / page).read_text(), re.DOTALL)
    loop = "\n    for step in range(first, 101):\n"
    assert example is not None and example[1].count(loop) == 1
    says = "\n    print(f'begins at {first - 1}\\n', end='', flush=True)"
    dies = "        if step == 45 and first == 1 and torch.distributed.get_rank() == 2: os.kill(os.getpid(), 9)\n"
    (tmp_path / "train.py").write_text("import os\n" + example[1].replace(loop, says + loop + dies))
    command = [sys.executable, *(word.format(4) for word in LAUNCHERS["torchrun"]), "train.py"]
    logs = [tmp_path / "killed.log", tmp_path / "again.log"]
    for log, code in zip(logs, (1, 0), strict=True):
        with log.open("wb") as file:
            done = subprocess.run(command, env=environment(shm, MLFLASH_JOB="readme"), cwd=tmp_path, stdout=file,
                                  stderr=file, timeout=PATIENCE_S, check=False)  # fmt: skip
        assert done.returncode == code, log.read_text()
    again = logs[1].read_text()
    begun = [int(step) for step in re.findall(r"begins at (\d+)", again)]
    assert len(begun) == 4 and len({*begun}) == 1 and 40 <= begun[0] <= 44, again
    first = again.splitlines()[0]
    assert first.startswith("mlflash protects 4 ranks on 1 node (") and "the loss of any process, but not" in first
    until(lambda: not left_here(), "the end of all that was started")


RANKS: dict[str, dict[str, str]] = {
    "ssh": {},
    "a file": {},
    "IPv6": {"MASTER_ADDR": "::1"},
    "Ray Train": {"LOCAL_RANK": "{rank}", "NODE_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
    "PyTorchJob": {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "{rank}", "PYTHONUNBUFFERED": "1"},
    "NVRx": {"LOCAL_RANK": "{rank}", "GROUP_RANK": "0", "ROLE_RANK": "{rank}", "LOCAL_WORLD_SIZE": "2",
             "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "3"},
}  # fmt: skip


@pytest.mark.parametrize(("launcher", "initializes"), [
    ("ssh", True), pytest.param("ssh", False, marks=pytest.mark.gate), ("a file", True), ("IPv6", False),
    ("Ray Train", True), ("PyTorchJob", False), ("NVRx", True),
])  # fmt: skip
def test_ranks_find_each_other_by_what_launchers_set(shm: Path, launcher: str, initializes: bool) -> None:
    """Two processes with these variables, and no launcher: what they have committed is restored by the next two."""
    for start in (None, 2):
        spec = {"last": (start or 0) + 2, "initializes": initializes, "settings": {"job": "j"}}
        spec |= {"file": str(shm / f"store-{start}")} if launcher == "a file" else {}
        program = [sys.executable, str(SUPPORT / "elastic_worker.py"), json.dumps(spec)]
        with PlainRanks(shm, 2, program, {**environment(shm), **RANKS[launcher]}) as ranks:
            assert ranks.wait() == [0, 0], ranks.log
        restored = ranks.records("restored")[-2:] if start is None else [
            record for record in ranks.records("restored") if record["step"] is not None]  # fmt: skip
        assert [(record["step"], record["same"], record["mpi"]) for record in restored] == [(start, True, False)] * 2
        how = "the store of torch.distributed" if initializes else "MASTER_ADDR and MASTER_PORT"
        assert all(record["courier"].endswith(f"met by {how})") for record in restored)
