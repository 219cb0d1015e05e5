"""`mlflash run` says what failed and whether it starts again, and ends a job that makes the same error again."""

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
from processes import killed_in_the_end
from unit.kept_job import SHELL
from waiting import PATIENCE_S, until

TRAIN = """
import os, pathlib, signal, sys
import numpy as np
import mlflash
out = pathlib.Path(sys.argv[2])
def step(number):
    if sys.argv[1] == "raises":
        raise ValueError(f"bad batch {os.getpid()}")
    if sys.argv[1] == "takes memory":
        bytearray(1 << 30)
    if not (out / "killed").exists():
        (out / "pid.part").write_text(str(os.getpid()))
        (out / "pid.part").rename(out / "pid")
        signal.pause()
state = {"x": np.zeros(8)}
with mlflash.Checkpointer(redundancy="none") as ckpt:
    newest = ckpt.restore(state) or ckpt.save(4, state).wait().step
    step(newest)
"""
KEPT = """
import os, numpy as np, mlflash
state = {"x": np.zeros(8)}
def train(ckpt, step):
    for step in range(step + 1, 1000):
        if step == 5 and os.environ["RANK"] == "1":
            raise ValueError(f"bad batch {os.getpid()}")
        ckpt.save(step, state).wait()
mlflash.keep_alive(train, state, timeout_s=30.0)
"""
GROUPS = Path("/sys/fs/cgroup/memory")


def command(shm: Path, out: Path, what: str) -> list[str]:
    (out / "train.py").write_text(TRAIN)
    options = ["-N", "1", "--job", "j", "--memory", str(shm), "--look-every", "0.5"]
    return [sys.executable, "-m", "mlflash", "run", *options, "--", sys.executable, "train.py", what, str(out)]


def ends(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "run.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] in ("end", "finish")]


@pytest.mark.gate
def test_the_same_error_after_the_same_step_ends_the_job_with_a_code_of_its_own(shm: Path, tmp_path: Path) -> None:
    ended = subprocess.run(command(shm, tmp_path, "raises"), cwd=tmp_path, timeout=PATIENCE_S, capture_output=True,
                           text=True, check=False)  # fmt: skip
    assert ended.returncode == 70, ended.stderr
    what = r"exit code 1: rank 0 on localhost: ValueError: bad batch \d+ \[\S+/train\.py:8 in step\]; newest checkpoint"
    assert re.search(f"start 1 failed: {what}: 4; it starts again: the error may not come again$", ended.stderr, re.M)
    why = "the same error came again after step 4"
    assert re.search(f"start 2 failed: {what}: 4; it does not start again: {why}$", ended.stderr, re.M), ended.stderr
    assert f"finished with exit code 70: {why}" in ended.stderr
    first, second, finish = ends(tmp_path)
    cause = first["cause"]
    assert (cause["kind"], cause["rank"], cause["host"]) == ("error", 0, "localhost")
    assert cause["text"].startswith("ValueError: bad batch ") and cause["evidence"] == f"{tmp_path}/train.py:8 in step"
    assert second["cause"]["kind"] == "error" and finish["code"] == 70 and finish["why"] == why


def test_a_rank_that_is_killed_from_outside_starts_again(shm: Path, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log, killed_in_the_end(
        command(shm, tmp_path, "waits"), cwd=tmp_path, stdout=log, stderr=log
    ) as run:  # fmt: skip
        until((tmp_path / "pid").exists, "the training to wait")
        (tmp_path / "killed").touch()
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        assert run.wait(PATIENCE_S) == 0, (tmp_path / "log").read_text()
    said = (tmp_path / "log").read_text()
    killed = r"exit code 137: rank 0 on localhost: its process was killed by signal 9 \[.*\]; newest checkpoint: 4"
    again = "it starts again: the signal came from outside of the training"
    assert re.search(f"start 1 failed: {killed}; {again}$", said, re.M), said
    first, second, _ = ends(tmp_path)
    assert first["cause"]["kind"] == "killed" and second["cause"] is None


@pytest.mark.skipif(not os.access(GROUPS / "memory.oom_control", os.W_OK), reason="needs cgroups of v1, as root")
def test_a_rank_that_takes_more_memory_than_its_cgroup_has_is_said_to_and_not_started_for_ever(
    shm: Path, tmp_path: Path
) -> None:
    group = GROUPS / f"mlflash-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(600 << 20))
        joins = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
        words = [*joins, *command(shm, tmp_path, "takes memory")]
        ended = subprocess.run(words, cwd=tmp_path, timeout=PATIENCE_S, capture_output=True, text=True, check=False)
    finally:
        until(lambda: not (group / "cgroup.procs").read_text(), "the end of all in it")
        group.rmdir()
    assert ended.returncode == 70, ended.stderr
    assert re.search(r"rank 0 on localhost: the kernel killed it because memory was used up \[.+\]", ended.stderr)
    assert [end["cause"]["kind"] for end in ends(tmp_path)[:2]] == ["out of memory"] * 2


@needs.MPI
def test_the_same_error_of_a_rank_that_is_kept_alive_ends_the_job(shm: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(KEPT)
    options = ["-N", "1", "--ranks-per-node", "2", "--keep-alive", "--spares", "1", "--lost-after", "2", "--job", "j"]
    words = [sys.executable, "-m", "mlflash", "run", *options, "--memory", str(shm), "--", sys.executable, "train.py"]
    ended = subprocess.run(words, cwd=tmp_path, timeout=PATIENCE_S, capture_output=True, text=True, check=False,
                           env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert ended.returncode == 70, ended.stderr
    lost = r"rank 1 was lost \(ValueError: bad batch \d+ \[\S+train\.py:7 in train\]\); all train on after step 4"
    assert re.search(lost, ended.stderr), ended.stderr
    assert ended.stderr.count("mlflash run: start ") == 2, "it is started once, and that fails"
    assert ends(tmp_path)[0]["cause"]["kind"] == "error" and ends(tmp_path)[-1]["code"] == 70


def test_a_node_with_a_gpu_that_failed_is_avoided(shm: Path, tmp_path: Path) -> None:
    shell = tmp_path / "ssh"
    shell.write_text(SHELL.format(folder=tmp_path))
    shell.chmod(0o700)
    raised = r"Traceback (most recent call last):\nAcceleratorError: CUDA error: uncorrectable ECC error encountered\n"
    program = f"test $RANK = 0 && exec sleep 3; mkdir {tmp_path}/failed && printf '{raised}' >&2 && exit 1; exit 0"
    words = [sys.executable, "-m", "mlflash", "run", "-N", "2", "--hosts", "a,b,c", "--rsh", str(shell), "--job", "j",
             "--memory", str(shm), "--look-every", "0.5", "--", "sh", "-c", program]  # fmt: skip
    ended = subprocess.run(words, cwd=tmp_path, timeout=PATIENCE_S, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [line["hosts"] for line in lines if line["event"] == "start"] == [["a", "b"], ["a", "c"]]
    assert ends(tmp_path)[0]["cause"]["kind"] == "device" and ends(tmp_path)[0]["cause"]["host"] == "b"
    assert "it starts again: other GPUs may be whole" in ended.stderr
