"""What a terminal shows does not mislead: each of these once did."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from harness import SUPPORT
from waiting import PATIENCE_S

import mlflash
from mlflash.run.processes import mpiexec

MLFLASH = str(Path(sys.executable).with_name("mlflash"))


def call(*words: object, code: int = 0, **more: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([MLFLASH, *map(str, words)], capture_output=True, text=True, timeout=PATIENCE_S, check=False,
                          **more)  # fmt: skip
    assert done.returncode == code, (done.stdout, done.stderr)
    return done


def save(memory: Path, job: str, *steps: int, **options: Any) -> None:
    given: dict[str, Any] = {"job": job, "memory": str(memory), "redundancy": "none"} | options
    with mlflash.Checkpointer(given.pop("directory", None), **given) as ckpt:
        for step in steps:
            ckpt.save(step, {"w": np.zeros(1000 * step), "lr": 0.1}).wait()


def read_until(terminal: int, mark: bytes) -> bytes:
    said = b""
    while mark not in said:
        assert select.select([terminal], [], [], PATIENCE_S)[0], said
        said += os.read(terminal, 1 << 16)
    return said


@pytest.mark.parametrize("command", ["status", "inspect 1", "list", "verify", "jobs", "plan --nodes 64 --bytes 12GiB"])
def test_a_reader_that_goes_away_changes_no_exit_code_and_nothing_is_printed_of_it(shm: Path, command: str) -> None:
    save(shm, "j", 1)
    where = [] if command.startswith("plan") else ["--memory", str(shm)]
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run([MLFLASH, *command.split(), *where], stdout=write, stderr=subprocess.PIPE, check=False,
                              timeout=PATIENCE_S)  # fmt: skip
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_jobs_are_listed_with_sizes_and_ages_the_largest_first(shm: Path) -> None:
    assert call("jobs", "--memory", shm).stdout == f"no job of this user holds memory in {shm} here\n"
    save(shm, "small", 1)
    save(shm, "large", 1, 200)
    assert "mlflash jobs" in call("clean", "--memory", shm, code=2).stderr
    lines = call("jobs", "--memory", shm).stdout.splitlines()
    rows = [line.split() for line in lines[3:5]]
    assert [(row[0], row[2], row[4]) for row in rows] == [("large", "MiB", "200"), ("small", "KiB", "1")]
    assert all("ago" in row and "no process is alive" in " ".join(row) for row in rows)
    assert lines[-1].startswith(f"2 jobs of this user in {shm}: ")
    told = json.loads(call("jobs", "--memory", shm, "--json").stdout)["jobs"]
    assert [(one["job"], one["step"], one["pid"], one["error"]) for one in told] == [
        ("large", 200, None, None), ("small", 1, None, None),
    ]  # fmt: skip
    assert told[0]["nbytes"] > 1_500_000 and 0 <= told[0]["age_s"] < PATIENCE_S


def test_clean_of_all_jobs_asks_before_it_deletes_them(shm: Path) -> None:
    save(shm, "mine", 1)
    save(shm, "theirs", 1)
    refused = call("clean", "--all", "--memory", shm, code=2, stdin=subprocess.DEVNULL)
    assert "add --yes to confirm" in refused.stderr
    for answer, left in (("n\n", 2), ("y\n", 0)):
        outside, inside = pty.openpty()
        with subprocess.Popen([MLFLASH, "clean", "--all", "--memory", str(shm)], stdin=inside, stdout=inside,
                              stderr=inside) as asking:  # fmt: skip
            os.close(inside)
            said = read_until(outside, b"[y/N]")
            os.write(outside, answer.encode())
            assert asking.wait(PATIENCE_S) == (1 if left else 0)
        os.close(outside)
        assert b"mine" in said and b"theirs" in said and b"These 2 jobs hold" in said
        assert len(json.loads(call("jobs", "--memory", shm, "--json").stdout)["jobs"]) == left
    save(shm, "mine", 1)
    assert "freed" in call("clean", "--all", "--yes", "--memory", shm).stdout


@pytest.mark.parametrize("form", ["hdf5", "dcp"])
def test_verify_counts_all_files_of_a_drained_checkpoint(shm: Path, tmp_path: Path, form: str) -> None:
    where = ("--job", "j", "-d", tmp_path / "d", "--memory", shm)
    save(shm, "j", 1, directory=tmp_path / "d", drain_every=1, format=form)
    (folder,) = (tmp_path / "d").iterdir()
    count = len(list(folder.iterdir()))
    assert f"{folder}: {count} of {count} files good" in call("verify", *where).stdout
    (folder / "verdict").write_text("anything")
    said = call("verify", *where, code=1).stdout
    assert f"{folder}: {count - 1} of {count} files good" in said and "damaged: verdict: " in said


def test_export_counts_one_tensor_and_takes_the_newest(shm: Path, tmp_path: Path) -> None:
    save(shm, "j", 1, 2, directory=tmp_path / "d", drain_every=1)
    said = call("export", "newest", tmp_path / "out", "--to", "hdf5", "-d", tmp_path / "d", "--memory", shm).stdout
    assert said.startswith(f"step 2 was written to {tmp_path / 'out'}: 1 tensor, ")
    call("mark", 2, "--bad", "--job", "j", "-d", tmp_path / "d", "--memory", shm)
    for step, exported in (("newest", 1), (2, 2)):
        to = tmp_path / f"out-{step}"
        said = call("export", step, to, "--to", "hdf5", "-d", tmp_path / "d", "--memory", shm).stdout
        assert said.startswith(f"step {exported} was written to "), "what is marked bad is given who asks for it"


MISTAKEN = """
import sys, numpy as np, mlflash
with mlflash.Checkpointer(job="j", memory=sys.argv[1], log=sys.argv[2]) as ckpt:
    ckpt.save(1, {"w": np.zeros(3)}).wait()
    ckpt.restore({"w": np.zeros(4)})
"""


@needs.MPI
@pytest.mark.parametrize("full", [False, True])
def test_an_error_on_all_ranks_is_shown_once_and_the_log_has_its_lines(shm: Path, tmp_path: Path, full: bool) -> None:
    program = tmp_path / "train.py"
    program.write_text(MISTAKEN)
    words = [sys.executable, str(program), str(shm), str(tmp_path / "events.jsonl")]
    command, environment = mpiexec(2, words, {"OMP_NUM_THREADS": "1", "MLFLASH_TRACEBACK": "full" if full else ""})
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=environment)
    said = done.stdout + done.stderr
    assert done.returncode != 0 and "differs from the checkpoint in 1 place:" in said
    assert ("load.py" in said) == full
    if not full:  # the other rank, which may be ended before, has a line at most
        assert said.count("Traceback") <= 1 and len(said.splitlines()) < 15, said
    logs = [json.loads(line) for path in tmp_path.glob("events*.jsonl") for line in path.read_text().splitlines()]
    uncaught = [event for event in logs if event["event"] == "uncaught"]
    assert uncaught and all("load.py" in event["text"] and "StructureMismatch" in event["text"] for event in uncaught)


ALONE = """
import pathlib, sys, numpy as np, mlflash
from mpi4py import MPI
with mlflash.Checkpointer(job="j", timeout_s=1.0) as ckpt:
    if MPI.COMM_WORLD.rank == 0:
        saved = ckpt.save(1, {"w": np.zeros(3)})
        try:
            saved.wait()
        except mlflash.errors.DeadlineExceeded as error:
            pathlib.Path(sys.argv[1]).write_text(str(error))  # the launcher may drop what is printed before an Abort
            MPI.COMM_WORLD.Abort(3)
    MPI.COMM_WORLD.recv(source=0)
"""


@needs.MPI
def test_where_one_rank_never_saves_it_is_named_and_that_all_ranks_have_to(shm: Path, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(ALONE)
    words = [sys.executable, str(SUPPORT / "on_node.py"), sys.executable, str(program), str(tmp_path / "error")]
    given = {"OMP_NUM_THREADS": "1", "MLFLASH_MEMORY": str(shm), "RANKS_PER_NODE": "1"}
    command, environment = mpiexec(2, words, given)
    subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=environment)
    said = (tmp_path / "error").read_text()
    assert "for rank 1 on node1" in said and "All ranks must make each collective call" in said
