"""Rolling back as a user does it: with the command, with the directory, and with `mlflash run`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from processes import ran
from waiting import until

import mlflash
from mlflash.errors import StepNotFound, Unrestorable


def options(shm: Path, **more: Any) -> dict[str, Any]:
    return {"memory": str(shm), "job": "j", "redundancy": "none", **more}


def command(shm: Path, *words: object, job: str = "j", code: int = 0) -> str:
    """What a command of mlflash prints about a job."""
    done = ran(sys.executable, "-m", "mlflash", *words, "--job", job, "--memory", shm, code=code)
    assert not done.stderr
    return done.stdout


def clean(shm: Path, job: str = "j") -> None:
    ran(sys.executable, "-m", "mlflash", "clean", job, "--memory", shm)


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
        assert command(shm, "mark", "2", "--bad") == "step 2 is marked bad in memory (1 node)\n", "while it is alive"
    assert restored(settings) == 1
    with mlflash.Checkpointer(**settings) as ckpt:
        ckpt.restore({"w": np.zeros(1000)})
        save(ckpt, 3)
    nowhere = command(shm, "mark", "7", code=1)
    assert nowhere == "step 7 of job j was not found on these nodes or in --directory\n"
    assert json.loads(command(shm, "mark", "3", "--good", "--json"))["verdict"] == "good"
    assert restored(settings, certified=True) == 3


def test_what_is_drained_and_marked_bad_hides_nothing_that_is_good(shm: Path, tmp_path: Path) -> None:
    """Step 2 is drained and bad, step 1 is good and in memory only."""
    with mlflash.Checkpointer(tmp_path, **options(shm)) as ckpt:
        save(ckpt, 1, 2)
        ckpt.drain()
        ckpt.wait_drained()
        ckpt.mark_bad(2)
    bad = "drained, but marked bad, and restored only if you ask for the step: 2\n"
    assert f"{bad}drained: nothing else in {tmp_path}" in command(shm, "status", "--directory", tmp_path)
    ran(sys.executable, "-m", "mlflash", "scavenge", tmp_path, "--job", "j", "--memory", shm)
    clean(shm)
    shown = command(shm, "status", "--directory", tmp_path)
    assert bad in shown and "drained: step 1, " in shown, shown
    assert restored(options(shm), tmp_path) == 1


def test_where_all_is_marked_bad_training_does_not_begin_anew_without_a_word(shm: Path, tmp_path: Path) -> None:
    with mlflash.Checkpointer(tmp_path, **options(shm, drain_every=1)) as ckpt:
        save(ckpt, 1)
        ckpt.wait_drained()
        ckpt.mark_bad(1)
    with pytest.raises(Unrestorable, match="step 1: it was marked bad"):
        restored(options(shm))
    clean(shm)
    for name in ("status", "list"):
        shown = json.loads(command(shm, name, "--directory", tmp_path, "--json", code=1))
        assert [checkpoint["values"] for checkpoint in shown["directory"]["checkpoints"]] == ["bad"], shown
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
        clean(shm, "other")
    said = command(shm, "mark", "3", "--directory", tmp_path, job="other")
    assert said == "step 3 is marked bad in step-00000003\n"
    assert restored(elsewhere, tmp_path) == 2
    clean(shm, "other")
    (tmp_path / "step-00000001" / "verdict").write_text("nonsense")
    with pytest.raises(StepNotFound, match="there is no step that is certified"):
        restored(elsewhere, tmp_path, certified=True)


def test_the_newest_certified_one_stays_despite_keep_last(shm: Path, tmp_path: Path) -> None:
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
with mlflash.Checkpointer(certify_after=1, redundancy="none", log="events.jsonl") as ckpt:
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
def test_mlflash_run_goes_back_from_nan_to_the_certified_step(shm: Path, tmp_path: Path) -> None:
    ended = ran(sys.executable, "-m", "mlflash", "run", "-N", 1, "--job", "j", "--memory", shm, "--look-every", 0.5,
                "--", sys.executable, "-c", PROGRAM, cwd=tmp_path)  # fmt: skip
    assert "the next start goes back to step 2, which is certified" in ended.stderr
    assert "from 2" in ended.stdout
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (recovered,) = [event for event in events if event["event"] == "recover"]
    began = max(event["time"] for event in events if event["event"] == "start")
    assert recovered["step"] == 2 and recovered["seconds"] >= recovered["time"] - began, "since before it began"
