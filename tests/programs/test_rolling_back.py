"""Rolling back as a user does it: with the command, with the directory, and with `mlflash run`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from waiting import PATIENCE_S, until

import mlflash
from mlflash.errors import StepNotFound, Unrestorable


def options(shm: Path, **more: Any) -> dict[str, Any]:
    return {"memory": str(shm), "job": "j", "redundancy": "none", **more}


def mlflash_command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "mlflash", *words], timeout=PATIENCE_S, capture_output=True, text=True,
                          check=False)  # fmt: skip


def save(ckpt: mlflash.Checkpointer, *steps: int, bad: int | None = None) -> None:
    for step in steps:
        ckpt.save(step, {"w": np.full(1000, np.nan if step == bad else float(step))}).wait()


def restored(settings: dict[str, Any], directory: Path | None = None, **wanted: Any) -> int | None:
    with mlflash.Checkpointer(directory, **settings) as ckpt:
        state = {"w": np.zeros(1000)}
        step = ckpt.restore(state, **wanted)
        assert step is None or (state["w"] == step).all()
        return step


def test_the_command_marks_a_step_bad_and_good_again(shm: Path) -> None:
    settings = options(shm)
    with mlflash.Checkpointer(**settings) as ckpt:
        save(ckpt, 1, 2)
        done = mlflash_command("mark", "2", "--bad", "--job", "j", "--memory", str(shm))  # while it is alive
        assert (done.returncode, done.stdout) == (0, "step 2 is marked bad in memory (1 node)\n"), done.stderr
    assert restored(settings) == 1
    with mlflash.Checkpointer(**settings) as ckpt:
        ckpt.restore({"w": np.zeros(1000)})
        save(ckpt, 3)
    nowhere = mlflash_command("mark", "7", "--job", "j", "--memory", str(shm))
    assert nowhere.returncode == 1
    assert nowhere.stdout == "step 7 of job j was not found on these nodes or in --directory\n"
    done = mlflash_command("mark", "3", "--good", "--json", "--job", "j", "--memory", str(shm))
    assert json.loads(done.stdout)["verdict"] == "good"
    assert restored(settings, certified=True) == 3


def test_what_is_drained_and_marked_bad_hides_nothing_that_is_good(shm: Path, tmp_path: Path) -> None:
    """Step 2 is drained and bad, step 1 is good and in memory only."""
    with mlflash.Checkpointer(tmp_path, **options(shm)) as ckpt:
        save(ckpt, 1, 2)
        ckpt.drain()
        ckpt.wait_drained()
        ckpt.mark_bad(2)
    where = ("--job", "j", "--memory", str(shm))
    bad = "drained, but marked bad, and restored only if you ask for the step: 2\n"
    shown = mlflash_command("status", *where, "--directory", str(tmp_path))
    assert (shown.returncode, f"{bad}drained: nothing else in {tmp_path}" in shown.stdout) == (0, True), shown.stdout
    taken = mlflash_command("scavenge", str(tmp_path), *where)
    assert (taken.returncode, "step 1 was drained to" in taken.stdout) == (0, True), taken.stdout + taken.stderr
    mlflash_command("clean", "j", "--memory", str(shm))
    shown = mlflash_command("status", *where, "--directory", str(tmp_path))
    assert bad in shown.stdout and "drained: step 1, " in shown.stdout and shown.returncode == 0, shown.stdout
    assert restored(options(shm), tmp_path) == 1


def test_where_all_that_is_there_is_marked_bad_training_does_not_begin_anew_without_a_word(
    shm: Path, tmp_path: Path
) -> None:
    with mlflash.Checkpointer(tmp_path, **options(shm, drain_every=1)) as ckpt:
        save(ckpt, 1)
        ckpt.wait_drained()
        ckpt.mark_bad(1)
    with pytest.raises(Unrestorable, match="step 1: it was marked bad"):
        restored(options(shm))
    mlflash_command("clean", "j", "--memory", str(shm))
    for command in ("status", "list"):
        found = mlflash_command(command, "--job", "j", "--memory", str(shm), "--directory", str(tmp_path), "--json")
        told = json.loads(found.stdout)["directory"]["checkpoints"]
        assert found.returncode == 1 and [one["values"] for one in told] == ["bad"], found.stdout + found.stderr
    with pytest.raises(Unrestorable, match="step 1: step-00000001: it was marked bad"):
        restored(options(shm), tmp_path)


def test_what_is_drained_has_its_verdict_and_comes_back_by_the_same_rules(shm: Path, tmp_path: Path) -> None:
    settings = options(shm, certify_after=1, drain_every=1)
    with mlflash.Checkpointer(tmp_path, **settings) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step, bad=3)
            ckpt.wait_drained()
    words = lambda: {folder.name: (folder / "verdict").read_text().split()[0] for folder in tmp_path.iterdir()}
    until(lambda: "CERTIFIED" in words().values(), "step 1 to be certified by step 2, in the directory, too")
    assert words() == {"step-00000001": "CERTIFIED", "step-00000002": "PASSED", "step-00000003": "SUSPECT"}
    elsewhere = options(shm, job="other")
    for wanted, step in (({"certified": True}, 1), ({"before": 3}, 2), ({"before": 2}, 1)):
        assert restored(elsewhere, tmp_path, **wanted) == step
        mlflash_command("clean", "other", "--memory", str(shm))
    done = mlflash_command("mark", "3", "--job", "other", "--memory", str(shm), "--directory", str(tmp_path))
    assert done.stdout == "step 3 is marked bad in step-00000003\n", done.stderr
    assert restored(elsewhere, tmp_path) == 2
    mlflash_command("clean", "other", "--memory", str(shm))
    (tmp_path / "step-00000001" / "verdict").write_text("nonsense")
    with pytest.raises(StepNotFound, match="there is no step that is certified"):
        restored(elsewhere, tmp_path, certified=True)


def test_the_newest_certified_one_stays_in_the_directory_whatever_keep_last_says(shm: Path, tmp_path: Path) -> None:
    settings, first = options(shm, certify_after=1, drain_every=1, keep_last=2), tmp_path / "step-00000001/verdict"
    with mlflash.Checkpointer(tmp_path, **settings) as ckpt:
        for step in range(1, 7):
            save(ckpt, step, bad=step if step > 2 else None)
            ckpt.wait_drained()
            if step == 2:
                until(lambda: first.read_text().startswith("CERTIFIED"), "the directory to know that")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}" for step in (1, 5, 6)]


PROGRAM = """
import numpy as np, os, mlflash
with mlflash.Checkpointer(certify_after=1, redundancy="none") as ckpt:
    state = {"w": np.zeros(1000)}
    start = ckpt.restore(state)
    print("from", start, flush=True)
    for step in (1, 2, 3, 4) if start is None else ():
        state["w"][:] = np.nan if step == 4 else step
        ckpt.save(step, state).wait()
    if start is None:
        os._exit(3)
raise SystemExit(0 if start == 2 else 9)
"""


@needs.MPI
def test_mlflash_run_goes_back_to_the_certified_step_where_what_was_saved_last_is_nan(
    shm: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "mlflash", "run", "-N", "1", "--job", "j", "--memory",
               str(shm), "--look-every", "0.5", "--", sys.executable, "-c", PROGRAM]  # fmt: skip
    ended = subprocess.run(command, cwd=tmp_path, timeout=PATIENCE_S, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "the next start goes back to step 2, which is certified" in ended.stderr
    assert "from 2" in ended.stdout
