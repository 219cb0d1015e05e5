"""What is left of mlflash where it is off: nothing, but that each call is still there and says so."""

from __future__ import annotations

import ast
import inspect
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from click.testing import CliRunner

import mlflash
from mlflash import config
from mlflash.checkpointer import disabled
from mlflash.cli import main
from mlflash.errors import ConfigError, Unrestorable

ADAPTERS = Path(__file__).parents[2] / "adapters"
# A launcher has started it, in a world that is not there: any call of MPI would fail.
PROGRAM = """
import json, logging, os, sys, threading
import numpy as np
import mlflash

before = set(os.listdir("/dev/shm"))
state = {"weights": np.arange(4.0), "object": mlflash.rng()}
with mlflash.Checkpointer("/nowhere/run", redundancy="no such scheme", strict=True, drain_every=3, colour=3,
                          sign_key="/nowhere/key.pem", provenance={1: object()}) as ckpt:
    assert not ckpt.enabled and ckpt.restore(state) is None and ckpt.restore(state, 7, source="/nowhere") is None
    assert ckpt.load() == ckpt.load(7, copy=False) == (None, None) and ckpt.steps() == [] and ckpt.last_step is None
    for step in (1, 2, 2, 1, "three", 4.5, None):
        snapshot = ckpt.save(step, object(), until="no optimizer")
        assert snapshot.wait(0) is snapshot and snapshot.done and snapshot.skipped and not snapshot.committed
        assert snapshot.error is None and snapshot.nbytes == 0 and snapshot.commit_s is None
        called = []
        snapshot.wait_staged(), snapshot.add_done_callback(called.append)
        assert called == [snapshot]
    assert ckpt.save(np.int64(5), state).step == 5
    ckpt.prepare(object()), ckpt.wait(), ckpt.wait_drained(0)
    drain = ckpt.drain()
    assert drain.wait(0) is drain and drain.done and drain.error is None and drain.path == "" and drain.nbytes == 0
    assert ckpt.scavenge() is None and ckpt.heal() is None and ckpt.survives == "nothing: mlflash is off"
    assert ckpt.last_step is None and ckpt.timeout_s == 300.0 and not ckpt.report()["enabled"]
ckpt.close()
assert ckpt.save(9, state).done, "closed or not"
assert (state["weights"] == np.arange(4.0)).all()
assert not {"mpi4py.MPI", "mpi4py", "torch", "h5py"} & sys.modules.keys(), sorted(sys.modules)
assert threading.active_count() == 1 and not os.listdir(os.environ["MLFLASH_MEMORY"]) and not os.listdir()
assert not [name for name in set(os.listdir("/dev/shm")) - before if "mlflash" in name and "test" not in name]
assert not logging.getLogger().handlers and not logging.getLogger("mlflash").handlers
"""
SAID = "mlflash is off (MLFLASH_DISABLE=1): nothing is saved in memory, and nothing is restored from there\n"


@pytest.fixture(params=["argument", "environment"])
def checkpointer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, shm: Path) -> mlflash.Checkpointer:
    """One that is off, by either way."""
    monkeypatch.setenv("MLFLASH_MEMORY", str(shm))
    monkeypatch.setattr(disabled, "_said", set())
    if request.param == "environment":
        monkeypatch.setenv("MLFLASH_DISABLE", "1")
    return mlflash.Checkpointer("/nowhere/run", enabled=request.param == "environment")


@pytest.mark.parametrize("rank", [0, 1])
def test_with_the_switch_no_method_does_anything_and_the_first_process_says_so_once(shm: Path, rank: int) -> None:
    folder = shm / "cwd"
    folder.mkdir()
    (shm / "memory").mkdir()
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PMI", "OMPI", "SLURM"))}
    environment |= {"MLFLASH_MEMORY": str(shm / "memory"), "MLFLASH_DISABLE": "1", "MLFLASH_TIMEOUT_S": "no number"}
    environment |= {"PMI_RANK": str(rank), "PMI_SIZE": "2", "SLURM_STEP_NUM_TASKS": "2"}
    program = PROGRAM + "\nmlflash.Checkpointer()\n"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], env=environment, cwd=folder, timeout=60,
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == (SAID if rank == 0 else "") and done.stdout == ""


def test_an_argument_turns_one_object_off_and_leaves_the_others(shm: Path) -> None:
    settings = {"memory": str(shm), "job": "j"}
    with mlflash.Checkpointer(enabled=False, **settings) as idle:
        assert idle.save(1, {"a": 1}).done and not any(shm.iterdir())
        with mlflash.Checkpointer(**settings) as ckpt:
            assert ckpt.enabled and ckpt.report()["enabled"]
            ckpt.save(1, {"a": 1}).wait()
            assert idle.restore({"a": 0}) is None and idle.steps() == []
    with mlflash.Checkpointer(**settings) as ckpt:
        assert ckpt.restore({"a": 0}) == 1, "what was in memory has stayed there"


def test_an_exception_passes_through(checkpointer: mlflash.Checkpointer) -> None:
    with pytest.raises(KeyError), checkpointer:
        raise KeyError


def test_no_hook_is_put_on_an_optimizer(checkpointer: mlflash.Checkpointer) -> None:
    import torch

    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    checkpointer.save(1, {"layer": layer, "optimizer": optimizer}, until=optimizer)
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks, layer._state_dict_hooks)
    assert not any(hooks) and "step" not in vars(optimizer)


def test_the_report_has_what_callers_read(checkpointer: mlflash.Checkpointer, shm: Path) -> None:
    with _on(shm) as other:
        expected = other.report()
    assert checkpointer.report().keys() == expected.keys()
    assert json.loads(json.dumps(checkpointer.report()))["node"] == expected["node"]


def _on(shm: Path) -> mlflash.Checkpointer:
    switch = os.environ.pop("MLFLASH_DISABLE", None)
    try:
        return mlflash.Checkpointer(memory=str(shm), job="j")
    finally:
        if switch is not None:
            os.environ["MLFLASH_DISABLE"] = switch


def test_adapters_find_nothing_and_may_call_all_they_call(checkpointer: mlflash.Checkpointer) -> None:
    adapting = checkpointer.adapting
    begun = adapting.begin(3, threading.current_thread())
    calls: dict[str, tuple[Any, ...]] = {
        "seen_by_first": (lambda: 2,), "save": (1, object()), "save_or_warn": (1, object()),
        "begin": (3, threading.current_thread()), "save_again": (ConfigError("why"), begun), "stage_ahead": (None,),
        "give_up": (None,), "read": (None, list, lambda: None), "go_on_instead": (Unrestorable("why"), "disk"),
        "load_together": (1, lambda: 4),
    }  # fmt: skip
    names = [name for name, _ in inspect.getmembers(type(adapting), inspect.isfunction) if not name.startswith("_")]
    found = {name: getattr(adapting, name)(*calls.get(name, ())) for name in names}
    assert found["load_together"] == 4 and found["seen_by_first"] == 2
    assert found["save_or_warn"].done and found["save_again"].wait().step == 3
    assert found["steps_alike"] == []
    nothing = {
        "newest_step",
        "newest_alike",
        "open",
        "stage_ahead",
        "read",
        "end_begun",
        "go_on_instead",
        "ask_drain",
        "give_up",
    }
    assert all(found[name] is None for name in nothing) and nothing <= found.keys()


@pytest.mark.parametrize(
    "kind",
    [
        disabled.Courier,
        disabled.Drains,
        disabled.SaveQueue,
        disabled.Newest,
        disabled.Restores,
    ],
)
def test_stand_ins_have_all_that_is_called_and_nothing_of_what_they_stand_for(kind: type) -> None:
    (base,) = kind.__bases__
    public = {name for name in vars(base) if not name.startswith("_")}
    assert public and public <= vars(kind).keys() | {"moves"}, public - vars(kind).keys()
    for name in public:
        mine, theirs = getattr(kind, name), getattr(base, name)
        if inspect.isfunction(theirs):
            assert [*inspect.signature(mine).parameters] == [*inspect.signature(theirs).parameters], name


@pytest.mark.parametrize(
    ("text", "given", "enabled"),
    [
        ("1", True, False), ("true", None, False), ("YES", True, False), ("on", True, False),
        ("0", True, True), ("no", None, True), ("", True, True), ("0", False, False), ("", False, False),
    ],
)  # fmt: skip
def test_off_is_off_whichever_says_so(text: str, given: bool | None, enabled: bool) -> None:
    env = {"MLFLASH_DISABLE": text, "MLFLASH_TIMEOUT_S": "5"}
    assert config.is_enabled(env, given) is enabled
    found = config.from_environment(env, "/a", enabled=given, strict=True)
    assert found.enabled is enabled and found.strict and found.timeout_s == (5.0 if enabled else 300.0)


def test_a_switch_that_says_nothing_clear_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLASH_DISABLE", "maybe")
    for make in (mlflash.Checkpointer, disabled.turned_off):
        with pytest.raises(ConfigError, match="MLFLASH_DISABLE is neither true nor false"):
            make()


def test_it_is_said_once_for_each_reason(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(disabled, "_said", set())
    for name in ("RANK", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    assert not disabled.turned_off() and not disabled.turned_off(True)
    for _ in range(2):
        assert disabled.turned_off(False)
        mlflash.Checkpointer(enabled=False)
        with monkeypatch.context() as patch:
            patch.setenv("MLFLASH_DISABLE", "1")
            assert disabled.turned_off(True)
    said = [record.getMessage().partition(":")[0] for record in caplog.records if record.levelno == logging.WARNING]
    assert said == ["mlflash is off (enabled=False)", "mlflash is off (MLFLASH_DISABLE=1)"]


# Commands


def test_commands_do_what_they_are_told(shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mlflash.Checkpointer(tmp_path, memory=str(shm), job="j") as ckpt:
        ckpt.save(3, {"a": np.arange(5.0)}).wait()
    monkeypatch.setenv("MLFLASH_DISABLE", "1")
    command = [sys.executable, "-m", "mlflash", "scavenge", str(tmp_path), "--job", "j", "--memory", str(shm)]
    found = subprocess.run(command, cwd=shm, timeout=60, capture_output=True, text=True, check=False)
    assert found.returncode == 0 and "is off" not in found.stderr, found.stderr
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000003"]


@pytest.mark.slow
def test_the_doctor_says_that_it_is_off(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLASH_DISABLE", "1")
    found = subprocess.run([sys.executable, "-m", "mlflash", "doctor", "--memory", str(shm)], cwd=shm, timeout=100,
                           capture_output=True, text=True, check=False)  # fmt: skip
    assert "MLFLASH_DISABLE=1: training saves and restores nothing" in found.stdout, found.stdout + found.stderr


@needs.MPI
@pytest.mark.slow
def test_a_run_under_mlflash_run_is_not_taken_for_one_that_hangs(tmp_path: Path, shm: Path) -> None:
    program = f"""
import pathlib, mlflash
from waiting import until
print("on:", mlflash.Checkpointer().enabled)
looks = set()
def seen():
    for line in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = line.read_text().split("\\0")
        except OSError:
            continue
        if any("mlflash.launcher.node_status" in word for word in words) and {str(shm)!r} in words:
            looks.add(line.parent.name)
    return len(looks)
until(lambda: seen() >= 5, "looks at this node, half a second after one another")
"""
    command = [sys.executable, "-m", "mlflash", "run", "-N", "1", "--launcher", "mpiexec", "--job", "j", "--memory",
               str(shm), "--hang-timeout", "1", "--look-every", "0.5", "--max-restarts", "0", "--", sys.executable,
               "-c", program]  # fmt: skip
    environment = {**os.environ, "MLFLASH_DISABLE": "1"}
    found = subprocess.run(command, cwd=tmp_path, env=environment, timeout=100, capture_output=True, text=True,
                           check=False)  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    assert "on: False" in found.stdout and "MLFLASH_DISABLE is set" in found.stderr


def test_a_run_refuses_a_switch_that_says_nothing_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLASH_DISABLE", "maybe")
    found = CliRunner().invoke(main, ["run", "-N", "1", "--job", "j", "--launcher", "mpiexec", "--", "true"])
    assert found.exit_code == 2 and "neither true nor false" in found.output


# Adapters

ENTRIES = {
    "dcp/writer.py": ["MemoryWriter"],
    "dcp/reader.py": ["MemoryReader"],
    "deepspeed/flash.py": ["attach", "Flash"],
    "fsdp/checkpoints.py": ["Checkpoints"],
    "lightning/flash.py": ["Flash"],  # MLFlashCallback
    "lightning/checkpoint_io.py": ["MemoryIO"],  # MLFlashCheckpointIO
    "megatron/easy.py": ["initialize"],
    "megatron/install.py": ["install", "checkpointing_context"],
    "megatron/local.py": ["LocalCheckpoints"],
    "megatron/shards.py": ["SaveShards", "LoadShards"],
    "megatron_bridge.py": ["use"],
    "nemo/callback.py": ["MLFlashCheckpointCallback"],
    "nemo/wrap.py": ["wrap_trainer_and_auto_resume_with_mlflash"],
    "replay/replay.py": ["Replay"],
    "transformers/flash.py": ["MLFlashCallback", "TrainerWrapper"],
}
"""Where a user turns an adapter on. TorchTitan's options have `memory_enable`, as they are all called memory_…"""
OTHERS = {
    # What asks a Checkpointer, or is made by one of the above, and needs no switch of its own.
    "latest", "step_of", "SafeLoadPlanner", "EngineState", "MemoryCheckpointEngine", "alike", "MemoryCheckpointManager",
    "MLFlashAsyncFinalizableCheckpointIO", "MLFlashAutoResume", "MLFlashCheckpointIO", "CheckpointingException",
    "work_without_nvrx", "AsyncRequest", "load_checkpoint", "save_checkpoint_if_needed", "close",
    # States of FSDP models, and torch.distributed itself: nothing of it is saved by them.
    "full_state_dict", "init_optim_state", "load_local_state_dict", "load_sharded_state_dict", "local_state_dict",
    "sharded_state_dict", "init_process_group", "allow", "DistributedFileSystemReader", "Ranker",
    "Mismatch", "Place",
}  # fmt: skip
FILES = ["megatron_bridge.py", "torchtitan.py", "distributed.py", "megatron/easy.py"]  # without an __all__


def _signature(file: str, name: str) -> ast.arguments:
    """The parameters of a function, or of a class's constructor, without importing any framework."""
    (node,) = (one for one in ast.parse((ADAPTERS / file).read_text()).body if getattr(one, "name", "") == name)
    if isinstance(node, ast.ClassDef):
        (node,) = (one for one in node.body if getattr(one, "name", "") == "__init__")
    assert isinstance(node, ast.FunctionDef)
    return node.args


@pytest.mark.parametrize(("file", "name"), [(file, name) for file, names in ENTRIES.items() for name in names])
def test_every_entry_of_an_adapter_takes_enabled(file: str, name: str) -> None:
    arguments = _signature(file, name)
    optional = [*zip(reversed(arguments.args), reversed(arguments.defaults), strict=False),
                *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]  # fmt: skip
    annotated = {one.arg: one.annotation for one in [*arguments.args, *arguments.kwonlyargs]}
    assert isinstance(annotated["enabled"], ast.Name) and annotated["enabled"].id == "bool"
    given = {one.arg: default for one, default in optional}
    if (file, name) != ("deepspeed/flash.py", "Flash"):  # which `attach` makes
        assert isinstance(given["enabled"], ast.Constant) and given["enabled"].value is True


def test_no_entry_of_an_adapter_is_forgotten() -> None:
    public: set[str] = set()
    for file in ADAPTERS.rglob("__init__.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                public |= set(ast.literal_eval(node.value))
    for name in FILES:
        nodes = ast.parse((ADAPTERS / name).read_text()).body
        public |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    public = {name for name in public if not name.startswith("_")}
    known = {name for names in ENTRIES.values() for name in names} | OTHERS
    assert len(public) > 25 and public <= known, public - known
    assert "memory_enable: bool = True" in (ADAPTERS / "torchtitan.py").read_text()


@pytest.fixture
def state() -> dict[str, Any]:
    import torch

    return {"weights": torch.arange(6.0), "other": {"epoch": 3}}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch's, of one process
@pytest.mark.parametrize("name", ["step-1", "no number", None])
def test_dcp_saves_nothing_and_finds_nothing(
    checkpointer: mlflash.Checkpointer, state: dict[str, Any], shm: Path, name: str | None
) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    from mlflash.adapters.dcp import MemoryReader, MemoryWriter, latest

    before = threading.enumerate()
    writer, reader = MemoryWriter(checkpointer), MemoryReader(checkpointer)
    assert isinstance(writer, MemoryWriter) and not writer.enabled and not reader.enabled
    writer.prepare(state)
    dcp.save(state, checkpoint_id=name, storage_writer=writer, no_dist=True)
    assert writer.stage(state)["weights"] is state["weights"], "nothing is copied"
    writer.close()
    assert latest(checkpointer) is None and reader.bytes_of("other") is None and not any(shm.iterdir())
    with pytest.raises(dcp.api.CheckpointException, match="no checkpoint in memory: mlflash is off"):
        dcp.load(state, checkpoint_id="step-1", storage_reader=reader, no_dist=True)
    assert torch.equal(state["weights"], torch.arange(6.0))
    assert not [one for one in threading.enumerate() if "mlflash" in one.name and one not in before]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_writer_alone_can_be_off(shm: Path, state: dict[str, Any]) -> None:
    import torch.distributed.checkpoint as dcp

    from mlflash.adapters.dcp import MemoryReader, MemoryWriter

    with mlflash.Checkpointer(memory=str(shm), job="j") as ckpt:
        dcp.save(state, checkpoint_id="1", storage_writer=MemoryWriter(ckpt), no_dist=True)
        dcp.save(state, checkpoint_id="2", storage_writer=MemoryWriter(ckpt, enabled=False), no_dist=True)
        assert ckpt.steps() == [1]
        dcp.load(state, storage_reader=MemoryReader(ckpt), no_dist=True)
        with pytest.raises(dcp.api.CheckpointException, match="mlflash is off"):
            dcp.load(state, storage_reader=MemoryReader(ckpt, enabled=False), no_dist=True)


def test_a_checkpoint_process_gets_no_tensors_and_no_door(
    checkpointer: mlflash.Checkpointer, state: dict[str, Any]
) -> None:
    import pickle

    from mlflash.adapters.dcp import MemoryWriter

    writer = MemoryWriter(checkpointer)
    threads = set(threading.enumerate())
    sent: Callable[[Any], Any] = lambda value: pickle.loads(pickle.dumps(value))
    arrived = sent(writer.stage(state))
    assert str(arrived["weights"].device) == "meta" and arrived["other"] == {"epoch": 3}
    again = sent(writer)
    again.set_up_storage_writer(True)
    assert type(again) is type(writer) and not again.enabled and again.storage_meta().checkpoint_id is None
    assert set(threading.enumerate()) <= threads


@pytest.mark.slow
def test_torchrun_is_enough_to_start_torch_distributed(shm: Path) -> None:
    program = """
import sys, torch.distributed as dist
from mlflash.adapters.distributed import init_process_group
init_process_group("gloo", "env://", world_size=2)
assert dist.get_world_size() == 2 and "mpi4py" not in sys.modules
values = [None, None]
dist.all_gather_object(values, dist.get_rank())
assert values == [0, 1]
dist.destroy_process_group()
"""
    (shm / "script.py").write_text(program)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PMI", "OMPI", "SLURM"))}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    found = subprocess.run(command, env={**environment, "MLFLASH_DISABLE": "1", "OMP_NUM_THREADS": "1"}, cwd=shm,
                           timeout=100, capture_output=True, text=True, check=False)  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert found.stderr.count("mlflash is off") == 1
