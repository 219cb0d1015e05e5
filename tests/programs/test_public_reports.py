"""What users of other libraries have reported, done to mlflash: each with the result that they had expected."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from waiting import PATIENCE_S, until

from mlflash import Checkpointer, errors

MIB = 1 << 20


def options(memory: Path) -> dict[str, Any]:
    return {"memory": str(memory), "redundancy": "none", "job": "report"}


class Training:
    """A model and its optimizer, whose tensors move to new storages before each save, as when they were offloaded."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 64)).square().mean().backward()
        self.optimizer.step()

    def move(self) -> None:
        old = []
        for parameter in self.model.parameters():
            old.append(parameter.data)
            parameter.data = parameter.data.clone()
            for name, value in self.optimizer.state[parameter].items():
                old.append(value)
                self.optimizer.state[parameter][name] = value.clone()
        for tensor in old:
            tensor.fill_(-7)

    def values(self) -> list[torch.Tensor]:
        moments = [value for one in self.optimizer.state.values() for value in one.values()]
        return [tensor.detach().clone() for tensor in (*self.model.parameters(), *moments)]


@pytest.mark.parametrize("is_lazy", [False, True])
def test_each_step_has_its_own_values_though_all_tensors_move_between_saves(shm: Path, is_lazy: bool) -> None:
    """NVIDIA-NeMo/RL#3312: with cached structure, every save after the first had the tensors of the first."""
    training = Training()
    with Checkpointer(**options(shm), strict=True) as ckpt:
        for step in range(1, 6):
            training.step()
            training.move()
            wanted = training.values()
            snapshot = ckpt.save(step, training.state, until=training.optimizer if is_lazy else ())
            training.step()
            snapshot.wait()
            other = Training()
            assert ckpt.restore(other.state) == step
            assert all(map(torch.equal, other.values(), wanted))


def test_who_opens_a_job_again_finds_what_another_process_has_saved_meanwhile(shm: Path) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#4758: after a restart in the process, a cached tracker named the old step."""
    with Checkpointer(**options(shm)) as ckpt:
        ckpt.save(1, {"w": np.full(9, 1)}).wait()
        assert ckpt.restore({"w": np.zeros(9, int)}) == 1
    program = f"""if True:
        import numpy as np
        from mlflash import Checkpointer
        with Checkpointer(**{options(shm)!r}) as ckpt:
            assert ckpt.restore({{"w": np.zeros(9, int)}}) == 1
            ckpt.save(2, {{"w": np.full(9, 2)}}).wait()
    """
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_S)
    state = {"w": np.zeros(9, int)}
    with Checkpointer(**options(shm)) as ckpt:
        assert ckpt.steps()[-1] == 2 and ckpt.restore(state) == 2 and state["w"].tolist() == [2] * 9


@pytest.mark.skipif(os.getuid() != 0, reason="needs root: mounts a file system")
def test_after_a_failed_save_lower_steps_are_saved_and_the_failed_one_never_comes_back(small: Path) -> None:
    """AI-Hypercomputer/maxtext#5260: a failed save stayed the latest, and later saves of lower steps were skipped."""
    with Checkpointer(**options(small)) as ckpt:
        for step in (10, 20):
            ckpt.save(step, {"w": np.full(MIB, step)}).wait()
        with pytest.raises(errors.SaveFailed, match="do not fit into its memory"):
            ckpt.save(30, {"w": np.full(8 * MIB, 30)}).wait()
        state = {"w": np.zeros(MIB, int)}
        assert ckpt.restore(state, before=30) == 20
        for step in (22, 25):
            ckpt.save(step, {"w": np.full(MIB, step)}).wait()
        assert ckpt.steps()[-1] == 25
    with Checkpointer(**options(small)) as ckpt:
        assert ckpt.restore(state) == 25 and set(state["w"].tolist()) == {25}


def test_a_signal_in_an_evaluation_and_a_kill_soon_after_lose_nothing_that_was_committed(shm: Path) -> None:
    """goodfire-ai/spd#741: 0 of 6 preempted runs had saved, as the signal came while the program evaluated."""
    program = f"""if True:
        import signal, sys
        import numpy as np
        from mlflash import Checkpointer
        stop = []
        signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
        with Checkpointer(**{options(shm)!r}) as ckpt:
            for step in (1, 2, 3):
                ckpt.save(step, {{"w": np.full(9, step)}}).wait()
            print("evaluating", flush=True)
            sys.stdin.read()  # the evaluation, after which it would ask for `stop`
    """
    training = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                text=True)  # fmt: skip
    try:
        assert training.stdout is not None and training.stdout.readline() == "evaluating\n"
        training.send_signal(signal.SIGTERM)
        assert training.poll() is None
    finally:
        training.kill()
        training.communicate(timeout=PATIENCE_S)
    state = {"w": np.zeros(9, int)}
    with Checkpointer(**options(shm), directory=shm / "kept") as ckpt:
        drain = ckpt.scavenge()
        assert drain is not None and drain.step == 3
        drain.wait()
        assert ckpt.restore(state) == 3 and state["w"].tolist() == [3] * 9
    until(lambda: [*(shm / "kept").glob("step-*3")], "the folder of the step")


def finish(drained: dict[str, Any], last: int) -> int | None:
    """Train to a step, with a save every 10 steps; return the step that it begins after."""
    state = {"w": np.zeros(9, int)}
    with Checkpointer(**drained) as ckpt:
        begun = ckpt.restore(state)
        assert state["w"].tolist() == [begun or 0] * 9
        for step in range((begun or 0) + 10, last + 1, 10):
            ckpt.save(step, {"w": np.full(9, step)}).wait()
    return begun


def lose_memory(shm: Path) -> None:
    shutil.rmtree(shm / f"mlflash-{os.getuid()}")


def test_the_last_step_of_a_run_that_ends_by_itself_is_in_the_directory(
    shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#5922: a save in memory counted as the one that is due when training ends."""
    drained = options(shm) | {"directory": str(shm / "kept"), "drain_every": 10}
    begun = []
    for last in (30, 50, 50):
        begun.append(finish(drained, last))
        lose_memory(shm)
    assert begun == [None, 30, 50]
    assert sorted(path.name for path in (shm / "kept").iterdir()) == ["step-00000030", "step-00000050"]
    assert "in memory only" not in caplog.text


def test_the_last_step_of_a_killed_run_is_in_the_directory_after_a_relaunch_that_has_nothing_left_to_do(
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
def test_a_run_that_ends_without_its_last_drain_says_that_its_last_step_is_in_memory_only(
    shm: Path, end: str, why: str
) -> None:
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
    return subprocess.run([sys.executable, "-c", program], check=False, timeout=PATIENCE_S, capture_output=True,
                          text=True)  # fmt: skip
