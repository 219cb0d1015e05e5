"""Trainings of one process: their names, their directory, libraries that are missing, and forks."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import free_port, ran
from waiting import PATIENCE_S, until

from mlflash import Checkpointer

TRAIN = """
import sys
import numpy as np
import mlflash

with mlflash.Checkpointer(redundancy="none") as ckpt:
    state = {"seed": np.array(int(sys.argv[2]))}
    step = ckpt.restore(state)
    print(step, int(state["seed"]))
    ckpt.save((step or 0) + 1, state).wait()
"""


def test_none_restores_what_another_one_has_saved(shm: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)

    def run(*words: str) -> tuple[str, str]:
        done = ran(sys.executable, script, *words, cwd=tmp_path, SLURM_JOB_ID=71, MLFLASH_MEMORY=shm)
        return done.stdout.strip(), done.stderr

    assert run("--seed", "1") == ("None 1", "")
    said, warned = run("--seed", "2")
    (own, other) = re.findall(r"slurm-71-[0-9a-f]{8}", warned)
    assert said == "None 2" and f"of others in this Slurm job: {other}. If it is one of them" in warned
    assert {own, other} == {path.name for path in shm.glob("mlflash-*/slurm-71-*")}
    assert run("--seed", "1") == ("1 1", "") and run("--seed", "2") == ("1 2", "")


# What is said at the start


def said(caplog: pytest.LogCaptureFixture, text: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if text in record.getMessage()]


def test_what_will_not_get_into_the_directory_is_said_at_the_start(
    shm: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("PMI", "OMPI", "SLURM"))]:
        monkeypatch.delenv(name)
    caplog.set_level(logging.INFO, "mlflash")
    (shm / "file").write_text("in the way")
    options = {"memory": str(shm), "redundancy": "none"}
    with Checkpointer(shm / "fine", **options, job="a"):
        info = until(lambda: said(caplog, "so nothing is written to"), "the line of a directory that gets nothing")
    assert str(shm / "fine") in info[0].getMessage() and info[0].levelno == logging.INFO
    with Checkpointer(shm / "file" / "below", **options, job="b", drain_every=1):
        warned = until(lambda: said(caplog, "can be drained to"), "the line of a directory that cannot be made")
    assert f"{shm / 'file'} is not a directory" in warned[0].getMessage() and warned[0].levelno == logging.WARNING
    assert len(said(caplog, "so nothing is written to")) == len(said(caplog, "can be drained to")) == 1
    assert not (shm / "fine").exists(), "nothing is made before it is needed"


def test_who_deletes_the_directory_is_told_of_the_memory(shm: Path, caplog: pytest.LogCaptureFixture) -> None:
    place, options = shm / "run", {"memory": str(shm), "redundancy": "none", "job": "d", "drain_every": 1}
    with Checkpointer(place, **options) as ckpt:
        ckpt.save(14, {"w": 1})
    assert not said(caplog, "does not exist")
    shutil.rmtree(place)
    with Checkpointer(place, **options) as ckpt:
        (warned,) = until(lambda: said(caplog, "does not exist"), "the line of a directory that is gone")
        assert ckpt.restore({"w": 1}) == 14
    assert warned.levelno == logging.WARNING
    assert all(word in warned.getMessage() for word in (str(place), "step 14", "MLFLASH_FRESH=1", "mlflash clean d"))
    with Checkpointer(place, **options, fresh=True) as ckpt:
        assert ckpt.restore({"w": 1}) is None
    assert len(said(caplog, "does not exist")) == 1, (
        "nothing is said of what is passed over, nor where the directory is"
    )


# What users of other libraries have reported, with the result that they had expected


def options(memory: Path) -> dict[str, Any]:
    return {"memory": str(memory), "redundancy": "none", "job": "report"}


def finish(drained: dict[str, Any], last: int) -> int | None:
    state = {"w": np.zeros(9, int)}
    with Checkpointer(**drained) as ckpt:
        begun = ckpt.restore(state)
        assert state["w"].tolist() == [begun or 0] * 9
        for step in range((begun or 0) + 10, last + 1, 10):
            ckpt.save(step, {"w": np.full(9, step)}).wait()
    return begun


def lose_memory(shm: Path) -> None:
    shutil.rmtree(shm / f"mlflash-{os.getuid()}")


def test_the_last_step_of_a_run_is_in_the_directory(shm: Path, caplog: pytest.LogCaptureFixture) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#5922: a save in memory counted as the one that is due when training ends."""
    drained = options(shm) | {"directory": str(shm / "kept"), "drain_every": 10}
    begun = []
    for last in (30, 50, 50):
        begun.append(finish(drained, last))
        lose_memory(shm)
    assert begun == [None, 30, 50]
    assert sorted(path.name for path in (shm / "kept").iterdir()) == ["step-00000030", "step-00000050"]
    assert "in memory only" not in caplog.text


def test_a_relaunch_drains_the_last_step_of_a_killed_run(
    shm: Path,
) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#5922, where the relaunch restores the last step, and so saves nothing."""
    drained = options(shm) | {"directory": str(shm / "kept"), "drain_every": 10}
    ended = run_to_step_30(drained, "os.kill(os.getpid(), signal.SIGKILL)")
    assert ended.returncode == -signal.SIGKILL and not (shm / "kept").exists()
    for _ in range(2):  # the second one drains nothing: it is there
        assert finish(drained, 30) == 30
        assert [path.name for path in (shm / "kept").iterdir()] == ["step-00000030"]
    lose_memory(shm)
    assert finish(drained, 30) == 30


@pytest.mark.parametrize(("end", "why"), [
    ("with ckpt: next(iter([]))", "an exception ended the training"),
    ("with ckpt: sys.exit(0)", "an exception ended the training"),
    ("pass", "this Checkpointer was left open"),
])  # fmt: skip
def test_a_last_step_that_is_in_memory_only_is_told(shm: Path, end: str, why: str) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#5922, where other ranks may go on, so that no rank can wait for a drain."""
    drained = options(shm) | {"directory": str(shm / "kept"), "drain_every": 10}
    ended = run_to_step_30(drained, end)
    assert ended.stderr.count("in memory only") == 1, ended.stderr
    assert f"step 30 is in memory only, and not in {shm / 'kept'}: {why}, so close() did not drain it" in ended.stderr
    assert finish(drained, 30) == 30
    is_there = run_to_step_30(drained | {"job": "other"}, f"ckpt.drain().wait(); {end.removeprefix('with ckpt: ')}")
    assert "in memory only" not in is_there.stderr and (shm / "kept" / "step-00000030.1").exists(), is_there.stderr


def run_to_step_30(drained: dict[str, Any], end: str) -> subprocess.CompletedProcess[str]:
    """Save steps 10, 20 and 30 in a process that then does a line of Python."""
    program = f"""if True:
        import os, signal, sys
        import numpy as np
        from mlflash import Checkpointer
        ckpt = Checkpointer(**{drained!r})
        for step in (10, 20, 30):
            ckpt.save(step, {{"w": np.full(9, step)}}).wait()
        {end}
    """
    return subprocess.run([sys.executable, "-c", program], timeout=PATIENCE_S, capture_output=True, text=True)


# Libraries that are not installed


COMPRESSED = """
import sys
if sys.argv[2] == "without":
    sys.modules["hdf5plugin"] = None
import numpy as np
import mlflash

settings = {"job": "k"}
if sys.argv[2] == "saves":
    settings = {"job": "j", "format": "hdf5", "compression": "zstd", "keep_last": 1}
with mlflash.Checkpointer(sys.argv[1], redundancy="none", **settings) as ckpt:
    state = {"a": np.tile(np.arange(5000.0), 50)}
    if sys.argv[2] == "saves":
        for step in (1, 2):
            ckpt.save(step, state).wait()
            ckpt.drain().wait()
    else:
        state["a"][:] = 0
        try:
            print(ckpt.restore(state), state["a"].sum())
        except mlflash.errors.ConfigError as error:
            print(error)
"""


def test_it_is_named_and_nothing_older_is_restored(shm: Path, tmp_path: Path) -> None:
    pytest.importorskip("hdf5plugin", reason="needs hdf5plugin: pip install 'mlflash[compression]'")

    def run(word: str) -> subprocess.CompletedProcess[str]:
        return ran(sys.executable, "-c", COMPRESSED, tmp_path / "d", word, cwd=tmp_path, MLFLASH_MEMORY=shm)

    run("saves")
    said = run("without")
    assert "cannot be read here: its compression (" in said.stdout, said.stdout + said.stderr
    assert "is not installed: pip install 'mlflash[compression]'" in said.stdout and "damaged" not in said.stderr
    assert [path.name for path in (tmp_path / "d").glob("step-*")] == ["step-00000002"]
    program = "import sys; sys.modules['hdf5plugin'] = None; from mlflash.cli import main; main()"
    words = [sys.executable, "-c", program, "verify", "--directory", tmp_path / "d", "--memory", shm]
    told = ran(*words, code=None)
    assert "is not installed: pip install 'mlflash[compression]'" in told.stdout + told.stderr
    assert run("with").stdout == f"2 {50 * sum(range(5000)):.1f}\n"


WITHOUT_TORCH = """
import sys
import numpy as np
import mlflash

state = {"array": np.arange(1000.0), "step": 3, "names": ["a", ("b", None)], "ratio": 0.5}
with mlflash.Checkpointer(sys.argv[1], job="n", redundancy="none", drain_every=1) as ckpt:
    ckpt.save(1, state).wait()
"""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_drain_in_the_format_of_pytorch_needs_no_pytorch(shm: Path, tmp_path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise ModuleNotFoundError('there is no torch here', name='torch')\n")
    words = [sys.executable, "-W", "error", "-c", WITHOUT_TORCH, tmp_path / "d"]
    assert "WARNING" not in ran(*words, MLFLASH_MEMORY=shm, PYTHONPATH=tmp_path).stderr
    loaded: dict[str, Any] = dict.fromkeys(("array", "step", "names", "ratio"), 0)
    dcp.load(loaded, checkpoint_id=str(tmp_path / "d" / "step-00000001"), no_dist=True)
    assert (loaded["array"] == range(1000)).all() and (loaded["step"], loaded["ratio"]) == (3, 0.5)
    assert loaded["names"] == ["a", ("b", None)]


# Forks

FORKING = """
import json, logging, multiprocessing, os, signal, sys
import numpy as np
import mlflash
from mlflash.errors import Closed, DeadlineExceeded

port = sys.argv[1]
state = {"a": np.ones(1000)}

def is_refused(call):
    try:
        call()
    except (Closed, DeadlineExceeded) as error:
        return "was forked" in str(error)
    return False

def listeners():
    rows = [line.split() for line in open("/proc/net/tcp").readlines()[1:]]
    wanted = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == int(port)}
    return wanted & {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                     if os.path.islink(f"/proc/self/fd/{fd}")}

def be_a_child(ckpt, snapshot):
    calls = [lambda: ckpt.save(9, state), lambda: ckpt.restore(state), ckpt.load, ckpt.steps, ckpt.wait, ckpt.drain,
             lambda: ckpt.adapting.seen_by_first(int), snapshot.wait]
    refused = [is_refused(call) for call in calls]
    assert all(refused), refused
    assert not listeners(), "a port that the parent may close"
    logging.getLogger("mlflash").warning("said by a child")
    ckpt.close()

pid = 0
with mlflash.Checkpointer("d", redundancy="none", log="log", metrics=f":{port}", drain_every=1, timeout_s=60) as ckpt:
    pulse = f"{ckpt.report()['memory']}/pulse-0000"
    assert listeners()
    ckpt.prepare(state)
    stop = lambda point: os.kill(ckpt._courier._connection.pid, signal.SIGSTOP) if point == "stage.begun" else None
    mlflash.crash_points.arm(stop)
    snapshot = ckpt.save(1, state)
    mlflash.crash_points.arm(None)
    before = open(pulse).read()
    for how in ("leaves", "exits", "raises"):
        if pid := os.fork():
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == (how == "raises"), how
        else:
            be_a_child(ckpt, snapshot)
            if how == "exits":
                sys.exit(0)
            if how == "raises":
                raise RuntimeError("of the child")
            break
    if pid:
        child = multiprocessing.get_context("fork").Process(target=be_a_child, args=(ckpt, snapshot))
        child.start()
        child.join(60)
        assert child.exitcode == 0
        assert (now := open(pulse).read()) == before, (now.strip(), before.strip())
        os.kill(ckpt._courier._connection.pid, signal.SIGCONT)
        assert snapshot.wait().committed and ckpt.save(2, state).wait().committed and ckpt.drain().wait().step == 2
if not pid:
    os._exit(0)
print(json.loads(open(pulse).read(4096))["state"], ckpt.report()["counts"]["committed"])
"""


def test_a_forked_child_touches_nothing_of_its_parent(shm: Path) -> None:
    done = ran(sys.executable, "-c", FORKING, free_port(), cwd=shm, timeout=100, MLFLASH_MEMORY=shm)
    assert done.stdout == "ended 2\n", done.stderr
    events = [json.loads(line) for line in (shm / "log").read_text().splitlines()]
    assert [event["event"] for event in events if event["event"] in ("start", "end")] == ["start", "end"]
    assert [event["step"] for event in events if event["event"] == "commit"] == [1, 2]
    assert "said by a child" in done.stderr and not any("said by a child" in str(event) for event in events)
    assert sum(path.name.startswith("step-") for path in (shm / "d").iterdir()) == 2, "drained by the parent"
