"""Trainings of one process: their names, their directory, libraries that are missing, and forks."""

from __future__ import annotations

import contextlib
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


MIB = 1 << 20


class Moving:
    """A training whose tensors move to new storages before each save, as when they were offloaded."""

    def __init__(self) -> None:
        import torch

        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        import torch

        self.model(torch.randn(8, 64)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

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

    def values(self) -> list[Any]:
        moments = [value for of_parameter in self.optimizer.state.values() for value in of_parameter.values()]
        return [tensor.detach().clone() for tensor in (*self.model.parameters(), *moments)]


@pytest.mark.parametrize("is_lazy", [False, True])
def test_each_step_has_its_own_values_though_all_tensors_move_between_saves(shm: Path, is_lazy: bool) -> None:
    """NVIDIA-NeMo/RL#3312: with a cached structure, every save after the first had the tensors of the first."""
    torch = pytest.importorskip("torch")
    training, wanted = Moving(), {}
    with Checkpointer(**options(shm), strict=True) as ckpt:
        for step in range(1, 7):  # no restore meanwhile, which would forget where tensors were
            training.step()
            training.move()
            wanted[step] = training.values()
            snapshot = ckpt.save(step, training.state, until=training.optimizer if is_lazy else ())
            training.step()
            snapshot.wait()
    other = Moving()
    other.step()
    with Checkpointer(**options(shm)) as ckpt:
        for step in (6, 5):
            assert ckpt.restore(other.state, step=step) == step
            assert all(map(torch.equal, other.values(), wanted[step])), step


def test_60_steps_that_are_loaded_while_saving_goes_on_have_their_own_values(shm: Path) -> None:
    """Lightning-AI/pytorch-lightning#21431: of 60 checkpoints that were saved and loaded in a loop, 2 were torn."""
    state, last = {"w": np.zeros(1 << 18), "step": 0}, 60
    with Checkpointer(**options(shm), strict=True) as ckpt:
        for step in range(1, last + 1):
            state["w"][:] = state["step"] = step
            snapshot = ckpt.save(step, state)
            state["w"][:] = state["step"] = -1
            found, loaded = ckpt.load() if step % 2 else (step, state)
            if step % 2 == 0:
                assert ckpt.restore(state, step=snapshot.wait().step) == step
            assert found in (step - 1, step) and loaded["step"] == found and (loaded["w"] == found).all()


def test_a_new_checkpointer_of_a_process_finds_what_another_process_has_saved_meanwhile(shm: Path) -> None:
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
        assert ckpt.steps()[-1] == ckpt.adapting.newest_step() == 2
        assert ckpt.restore(state) == 2 and state["w"].tolist() == [2] * 9


def test_the_newest_of_memory_directory_and_source_is_taken_and_a_source_that_is_named_wins(shm: Path) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#5090, #4900: not all places were looked at, and training began at the first step."""
    state, place, other = {"w": np.zeros(9, int)}, shm / "own", shm / "other"

    def save(step: int, directory: Path, job: str = "report") -> None:
        with Checkpointer(directory, **options(shm) | {"job": job}) as ckpt:
            ckpt.save(step, {"w": np.full(9, step)}).wait()
            ckpt.drain().wait()

    def restored(**of: Any) -> int | None:
        with Checkpointer(place, **options(shm)) as ckpt:
            step = ckpt.restore(state, **of)
            assert step is None or state["w"].tolist() == [step] * 9
            return step

    assert restored() is None
    save(70, other, "another")
    assert restored(source=other) == 70, "though this job has nothing"
    lose_memory(shm)
    save(10, place)
    lose_memory(shm)
    assert restored() == 10, "from the directory"
    with Checkpointer(**options(shm)) as ckpt:
        ckpt.save(20, {"w": np.full(9, 20)}).wait()
    assert restored() == 20, "from memory"
    assert restored(source=other) == 70
    assert restored(step=10) == 10, "from the directory"


def test_3000_tensors_take_few_descriptors(shm: Path) -> None:
    """InternLM/xtuner#1859: a checkpoint process got a descriptor for each of 3,000 tensors, and reached the limit."""
    program = f"""if True:
        import os, resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
        import torch
        from mlflash import Checkpointer
        state = {{f"t{{i}}": torch.full((3,), float(i)) for i in range(3000)}}
        with Checkpointer({str(shm / "kept")!r}, **{options(shm)!r}, strict=True) as ckpt:
            for step in (1, 2, 3):
                ckpt.save(step, state).wait()
            ckpt.drain().wait()
            for tensor in state.values():
                tensor.zero_()
            assert ckpt.restore(state) == 3 and all(state[f"t{{i}}"].eq(i).all() for i in range(3000))
            print(len(os.listdir("/proc/self/fd")))
    """
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", program], timeout=PATIENCE_S, capture_output=True, text=True)
    assert done.returncode == 0 and int(done.stdout) < 64, done.stdout + done.stderr


def test_a_hundred_saves_and_five_drains_keep_no_memory(shm: Path) -> None:
    """marin-community/marin#6774: each save left its copy of the state, until the kernel killed the job."""

    def held_kib(pid: int) -> int:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1])

    state = {"w": np.zeros(2 * MIB), "small": [np.zeros(9) for _ in range(100)]}  # 16 MiB
    with Checkpointer(shm / "kept", **options(shm), strict=True, keep_last=1) as ckpt:
        pids = [os.getpid(), int(re.findall(r"pid (\d+)", ckpt.report()["courier"])[0])]
        before = [0, 0]
        for step in range(1, 164):
            ckpt.save(step, state).wait()
            if step % 20 == 0:
                ckpt.drain().wait()
            if step == 63:  # the buffers of drains are there
                before = [held_kib(pid) for pid in pids]
        grown = [held_kib(pid) - kib for pid, kib in zip(pids, before, strict=True)]
        assert max(grown) < 32 << 10, f"{grown} KiB: 100 copies would be 1.6 GiB"
        assert sum(path.stat().st_size for path in shm.glob("mlflash-*/report/slot-*")) < 4 * 17 * MIB


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_a_trainer_and_its_loader_workers_costs_no_committed_step(shm: Path, sent: signal.Signals) -> None:
    """KempnerInstitute/KempnerForge#177, GaTech-RL2/EgoVerse#621: forked workers have the handler of the trainer, too.

    PyTorch ends a worker by SIGTERM, and raises in the trainer then, or loses the connection to it.
    """
    pytest.importorskip("torch")
    program = f"""if True:
        import os, signal
        import numpy as np, torch
        from mlflash import Checkpointer
        ckpt, state, stop, trainer = Checkpointer(**{options(shm)!r}), {{"w": np.zeros(9)}}, [], os.getpid()

        def asked(number, frame):
            stop.append(number)
            if os.getpid() != trainer:
                print("saved by a worker", ckpt.save(1000, state).wait().step, flush=True)

        signal.signal({int(sent)}, asked)

        class Endless(torch.utils.data.IterableDataset):
            def __iter__(self):
                while True:
                    yield torch.ones(3)

        begun = ckpt.restore(state) or 0
        assert (state["w"] == begun).all()
        print("begun", begun, flush=True)
        for step, batch in enumerate(torch.utils.data.DataLoader(Endless(), num_workers=2), begun + 1):
            state["w"][:] = step
            print("committed", ckpt.save(step, state).wait().step, flush=True)
            if stop:
                os._exit(0)
    """
    newest = 0
    for _ in range(2):
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        training = subprocess.Popen([sys.executable, "-c", program], start_new_session=True, **pipes)
        try:
            assert training.stdout is not None
            begun = int(training.stdout.readline().removeprefix("begun "))
            assert begun in (newest, newest + 1) if newest else begun == 0
            for step in range(begun + 1, begun + 4):
                assert training.stdout.readline() == f"committed {step}\n"
            os.killpg(training.pid, sent)
            rest, said = training.communicate(timeout=PATIENCE_S)
            assert training.returncode == 0 or "/torch/utils/data/" in said, said
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(training.pid, signal.SIGKILL)
        assert "worker 1000" not in rest
        newest = max([begun + 3, *(int(line.split()[1]) for line in rest.splitlines())])


def test_a_signal_in_an_evaluation_and_a_kill_soon_after_lose_nothing_that_was_committed(shm: Path) -> None:
    """goodfire-ai/spd#741: 0 of 6 preempted runs had saved, as the signal came while the program evaluated."""
    program = f"""if True:
        import signal, time
        import numpy as np
        from mlflash import Checkpointer
        stop = []
        signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
        with Checkpointer(**{options(shm)!r}) as ckpt:
            for step in (1, 2, 3):
                ckpt.save(step, {{"w": np.full(9, step)}}).wait()
            print("evaluating", flush=True)
            while True:  # it asks for `stop` after the evaluation, which does not end
                time.sleep(0.1)
    """
    training = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert training.stdout is not None and training.stdout.readline() == "evaluating\n"
        training.send_signal(signal.SIGTERM)
        assert training.poll() is None
    finally:
        training.kill()
        training.communicate(timeout=PATIENCE_S)
    state = {"w": np.zeros(9, int)}
    with Checkpointer(shm / "kept", **options(shm)) as ckpt:
        drain = ckpt.scavenge()
        assert drain is not None and drain.wait().step == 3
    lose_memory(shm)
    with Checkpointer(shm / "kept", **options(shm)) as ckpt:
        assert ckpt.restore(state) == 3 and state["w"].tolist() == [3] * 9


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
