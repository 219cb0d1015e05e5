"""Launchers without MPI on one host: README's example under torchrun, and each way to set RANK and WORLD_SIZE.

Nodes that are apart are in tests/cluster/test_launchers.py, frameworks in tests/frameworks/test_contract.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import needs
import pytest
from harness import LAUNCHERS, SUPPORT, TESTS
from processes import free_port, left_here
from waiting import PATIENCE_S, until

REPO = TESTS.parent
pytestmark = [needs.MPI, needs.PMI_1]


def environment(shm: Path, **more: object) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI", "SLURM", "MLFLASH"))
    }
    own = {"MLFLASH_MEMORY": shm, "OUT": shm, "OMP_NUM_THREADS": 1, **more}
    return kept | {name: str(value) for name, value in own.items()}


def records(shm: Path, event: str) -> list[dict[str, Any]]:
    lines = [line for path in sorted(shm.glob("rank*.jsonl")) for line in path.read_text().splitlines()]
    return [record for record in map(json.loads, lines) if record["event"] == event]


def test_the_example_of_the_readme_is_killed_under_torchrun_and_goes_on(shm: Path) -> None:
    """As README.md has it, but for the directory, a line that says where it begins, and a larger state."""
    example = re.search(r"```python\n(.*?)```", (REPO / "README.md").read_text(), re.DOTALL)
    assert example is not None
    program = example[1].replace("/lustre/me/run42", str(shm / "run42"))
    says = "print(f'begins at {start}\\n', end='', flush=True)"
    program = program.replace("    for step in", f"    {says}\n    for step in", 1)
    program = program.replace("100_000", "3_000_000")
    assert program.count("begins at") == 1 and program.count("3_000_000") == 2
    (shm / "train.py").write_text(program)
    command = [sys.executable, *(word.format(4) for word in LAUNCHERS["torchrun"]), str(shm / "train.py")]
    with (shm / "log").open("wb") as log:
        first = subprocess.Popen(command, env=environment(shm), cwd=shm, stdout=log, stderr=log)
    until(lambda: committed(shm) >= 20 or first.poll() is not None, "two checkpoints")
    workers = [pid for pid in left_here() if b"train.py" in cmdline(pid) and b"torch" not in cmdline(pid)]
    assert len(workers) == 4
    os.kill(workers[2], signal.SIGKILL)
    assert first.wait(PATIENCE_S) == 1, (shm / "log").read_text()
    again = subprocess.run(command, env=environment(shm), cwd=shm, capture_output=True, text=True, timeout=PATIENCE_S,
                           check=False)  # fmt: skip
    assert again.returncode == 0, again.stderr
    begun = [int(step) for step in re.findall(r"begins at (\d+)", again.stdout)]
    assert len(begun) == 4 and len({*begun}) == 1 and 20 <= begun[0] < 100, again.stdout + again.stderr
    until(lambda: not left_here(), "the end of all that was started")


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def committed(shm: Path) -> int:
    """The newest step that all ranks have committed, as the node's memory says."""
    command = [sys.executable, "-m", "mlflash", "list", "--json"]
    env = environment(shm)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    return max((int(step) for step in re.findall(r'"step": (\d+)', done.stdout)), default=0)


RANKS: dict[str, dict[str, object]] = {
    "ssh": {},
    "IPv6": {"MASTER_ADDR": "::1"},
    "Ray Train": {"LOCAL_RANK": "{rank}", "NODE_RANK": 0, "LOCAL_WORLD_SIZE": 2},
    "PyTorchJob": {"PET_NNODES": 2, "PET_NPROC_PER_NODE": 1, "PET_NODE_RANK": "{rank}", "PYTHONUNBUFFERED": 1},
    "NVRx": {"LOCAL_RANK": "{rank}", "GROUP_RANK": 0, "ROLE_RANK": "{rank}", "LOCAL_WORLD_SIZE": 2,
             "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 3},
}  # fmt: skip


@pytest.mark.parametrize(
    ("launcher", "initializes"),
    [
        ("ssh", True),
        pytest.param("ssh", False, marks=pytest.mark.gate),
        ("IPv6", False),
        ("Ray Train", True),
        ("PyTorchJob", False),
        ("NVRx", True),
    ],
)
def test_ranks_find_each_other_by_what_launchers_set(shm: Path, launcher: str, initializes: bool) -> None:
    """Two processes with these variables, and no launcher: what they have committed is restored by the next two."""
    for start in (None, 2):
        port, processes = free_port(), []
        spec = {"last": (start or 0) + 2, "initializes": initializes, "settings": {"job": "j"}}
        for rank in range(2):
            names = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            given = {name: str(value).format(rank=rank) for name, value in RANKS[launcher].items()}
            env = environment(shm, **{**names, "RANK": rank, **given})
            program = [sys.executable, str(SUPPORT / "elastic_worker.py"), json.dumps(spec)]
            processes.append(subprocess.Popen(program, env=env))
        assert [process.wait(PATIENCE_S) for process in processes] == [0, 0]
        restored = records(shm, "restored")[-2:] if start is None else [
            record for record in records(shm, "restored") if record["step"] is not None]  # fmt: skip
        assert [(record["step"], record["same"], record["mpi"]) for record in restored] == [(start, True, False)] * 2
        how = "the store of torch.distributed" if initializes else "MASTER_ADDR and MASTER_PORT"
        assert all(record["courier"].endswith(f"met by {how})") for record in restored)
