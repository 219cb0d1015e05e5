"""What is left of mlflash where it is off: nothing, but that each call is still there and says so (docs/off.md)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import needs
import pytest
import torch
import torch.distributed.checkpoint as dcp

import mlflash
from mlflash import config
from mlflash.adapters.dcp import MemoryReader, MemoryWriter
from mlflash.checkpointer.off import turned_off
from mlflash.errors import ConfigError

# A launcher has started it, in a world that is not there: any call of MPI would fail.
PROGRAM = """
import logging, os, sys, threading, numpy as np, mlflash
before = set(os.listdir("/dev/shm"))
state = {"weights": np.arange(4.0), "object": mlflash.rng()}
with mlflash.Checkpointer("/nowhere/run", redundancy="no such scheme", strict=True, drain_every=3, colour=3,
                          sign_key="/nowhere/key.pem", provenance={1: object()}) as ckpt:
    assert not ckpt.enabled and ckpt.restore(state) is None and ckpt.restore(state, 7, source="/nowhere") is None
    assert ckpt.load() == ckpt.load(7, copy=False) == (None, None) and ckpt.steps() == [] and ckpt.last_step is None
    called = []
    for step in (1, 2, 2, 1, "three", 4.5, None):
        snapshot = ckpt.save(step, object(), until="no optimizer")
        assert snapshot.wait(0) is snapshot and snapshot.done and snapshot.skipped and not snapshot.committed
        assert snapshot.error is None and snapshot.nbytes == 0 and snapshot.commit_s is None
        snapshot.wait_staged(), snapshot.add_done_callback(called.append)
    assert ckpt.save(np.int64(5), state).step == 5 and len(called) == 7
    ckpt.prepare(object()), ckpt.wait(), ckpt.wait_drained(0), ckpt.mark_bad(3), ckpt.adapting.loaded_elsewhere()
    drain = ckpt.drain()
    assert drain.wait(0) is drain and drain.done and drain.error is None and drain.path == "" and drain.nbytes == 0
    assert ckpt.scavenge() is ckpt.reprotect() is None and ckpt.survives == "nothing: mlflash is off"
    assert ckpt.last_step is None and ckpt.timeout_s == 300.0 and not ckpt.report()["enabled"]
assert ckpt.close() is None and ckpt.save(9, state).done and (state["weights"] == np.arange(4.0)).all()
assert not {"mpi4py.MPI", "mpi4py", "torch", "h5py"} & sys.modules.keys(), sorted(sys.modules)
assert threading.active_count() == 1 and not os.listdir(os.environ["MLFLASH_MEMORY"]) + os.listdir()
assert not [name for name in set(os.listdir("/dev/shm")) - before if "mlflash" in name and "test" not in name]
assert not logging.getLogger().handlers and not logging.getLogger("mlflash").handlers
assert not mlflash.Checkpointer().enabled
"""
SAID = "mlflash is off (MLFLASH_DISABLE=1): nothing is saved in memory, and nothing is restored from there\n"
DISABLED = {key: value for key, value in os.environ.items() if not key.startswith(("PMI", "OMPI", "SLURM"))}
DISABLED |= {"MLFLASH_DISABLE": "1", "OMP_NUM_THREADS": "1"}
RUN = ["-m", "mlflash", "run", "-N", "1", "--job", "j", "--max-restarts", "0"]


def run(folder: Path, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], env=DISABLED | more, cwd=folder, timeout=100, capture_output=True,
                          text=True, check=False)  # fmt: skip


@pytest.mark.parametrize("rank", [0, 1])
def test_with_the_switch_no_method_does_anything_and_the_first_process_says_so_once(
    shm: Path, tmp_path: Path, rank: int
) -> None:
    launched = {"PMI_RANK": str(rank), "PMI_SIZE": "2", "SLURM_STEP_NUM_TASKS": "2", "MLFLASH_TIMEOUT_S": "no number"}
    done = run(tmp_path, "-W", "error", "-c", PROGRAM, MLFLASH_MEMORY=str(shm), **launched)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", SAID if rank == 0 else "")


def test_an_argument_turns_one_object_off_and_leaves_the_others(shm: Path) -> None:
    settings = {"memory": str(shm), "job": "j"}
    optimizer = torch.optim.SGD((layer := torch.nn.Linear(2, 2)).parameters(), lr=1.0)
    with pytest.raises(KeyError), mlflash.Checkpointer(enabled=False, **settings) as idle:
        assert idle.save(1, {"layer": layer, "optimizer": optimizer}, until=optimizer).done and not any(shm.iterdir())
        hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks, layer._state_dict_hooks)
        assert not any(hooks) and "step" not in vars(optimizer), "no hook is put on them"
        with mlflash.Checkpointer(**settings) as ckpt:
            assert ckpt.report()["enabled"] and ckpt.report().keys() == idle.report().keys()
            ckpt.save(1, {"a": 1}).wait()
            assert idle.restore({"a": 0}) is None and idle.steps() == []
        raise KeyError
    with mlflash.Checkpointer(**settings) as ckpt:
        assert ckpt.restore({"a": 0}) == 1, "what was in memory has stayed there"


@pytest.mark.parametrize(("text", "given", "enabled"), [
    ("1", True, False), ("true", None, False), ("YES", True, False), ("on", True, False), ("0", True, True),
    ("no", None, True), ("", True, True), ("0", False, False), ("", False, False),
])  # fmt: skip
def test_off_is_off_whichever_says_so(text: str, given: bool | None, enabled: bool) -> None:
    env = {"MLFLASH_DISABLE": text, "MLFLASH_TIMEOUT_S": "5"}
    found = config.from_environment(env, "/a", enabled=given, strict=True)
    assert found.enabled is enabled and found.strict and found.timeout_s == (5.0 if enabled else 300.0)


def test_a_switch_that_says_nothing_clear_is_an_error(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLASH_DISABLE", "maybe")
    for make in (mlflash.Checkpointer, turned_off):
        with pytest.raises(ConfigError, match="MLFLASH_DISABLE is neither true nor false"):
            make()
    found = run(shm, *RUN, "--", "true", MLFLASH_DISABLE="maybe")
    assert found.returncode == 2 and "neither true nor false" in found.stderr


def test_commands_do_what_they_are_told(shm: Path, tmp_path: Path) -> None:
    with mlflash.Checkpointer(tmp_path, memory=str(shm), job="j") as ckpt:
        ckpt.save(3, {"a": 5}).wait()
    found = run(shm, "-m", "mlflash", "scavenge", str(tmp_path), "--job", "j", "--memory", str(shm))
    assert found.returncode == 0 and "is off" not in found.stderr, found.stderr
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000003"]


@needs.MPI
@pytest.mark.slow
def test_the_doctor_says_it_and_a_run_is_not_taken_for_one_that_hangs(shm: Path) -> None:
    assert "MLFLASH_DISABLE=1: training saves and" in run(shm, "-m", "mlflash", "doctor", "--memory", str(shm)).stdout
    options = ["--memory", str(shm), "--hang-timeout", "1", "--look-every", "0.5"]
    program = "import time, mlflash; print('on:', mlflash.Checkpointer().enabled); time.sleep(5)"
    found = run(shm, *RUN, *options, "--", sys.executable, "-c", program)
    assert found.returncode == 0 and "on: False" in found.stdout, found.stdout + found.stderr
    assert "MLFLASH_DISABLE is set" in found.stderr


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch's, of one process
def test_a_writer_or_a_reader_alone_can_be_off(shm: Path) -> None:
    state = {"weights": torch.arange(6.0)}
    with mlflash.Checkpointer(memory=str(shm), job="j") as ckpt:
        dcp.save(state, checkpoint_id="1", storage_writer=MemoryWriter(ckpt), no_dist=True)
        dcp.save(state, checkpoint_id="2", storage_writer=MemoryWriter(ckpt, enabled=False), no_dist=True)
        assert ckpt.steps() == [1]
        dcp.load(state, storage_reader=MemoryReader(ckpt), no_dist=True)
        with pytest.raises(dcp.api.CheckpointException, match="mlflash is off"):
            dcp.load(state, storage_reader=MemoryReader(ckpt, enabled=False), no_dist=True)
