"""What Megatron finds of NVRx after `install()`, and what a worker of Megatron's does for a save."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import ran
from waiting import is_in, until

from mlflash.adapters.megatron.request import request, wait_for
from mlflash.errors import DeadlineExceeded
from mlflash.save.snapshot import Snapshot

# NVRx; each case in a Python of its own


# As in megatron.training.training.pretrain and megatron.training.arguments of Core 0.19.
MAKE = """
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from nvidia_resiliency_ext.checkpointing.local.replication.group_utils import GroupWrapper, parse_group_sequence
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy
strategy = CliqueReplicationStrategy.from_replication_params(4, FACTOR) if FACTOR else None
manager = LocalCheckpointManager("/local/run", repl_strategy=strategy)
from mlflash.adapters.megatron import LocalCheckpoints
assert isinstance(manager, LocalCheckpoints)
assert str(manager.local_ckpt_dir) == "/local/run/0"
print(manager._settings["redundancy"], manager._settings.get("timeout_s"))
"""
NVRX = {
    "__init__": "",
    "checkpointing/__init__": "",
    "checkpointing/async_ckpt/__init__": "",
    "checkpointing/async_ckpt/core": "AsyncRequest = tuple",
    "checkpointing/local/__init__": "",
    "checkpointing/local/base_state_dict": "class TensorAwareStateDict: pass",
    "checkpointing/local/ckpt_managers/__init__": "",
    "checkpointing/local/ckpt_managers/base_manager": "class BaseCheckpointManager: pass\n"
    "class CheckpointingException(Exception): pass\n"
    "class SameMachineReplicationException(CheckpointingException): pass\nCkptID = tuple",
    "checkpointing/local/ckpt_managers/local_manager": "class LocalCheckpointManager: pass",
    "checkpointing/local/replication/__init__": "",
    "checkpointing/local/replication/group_utils": "parse_group_sequence = 'theirs'\nclass GroupWrapper: pass",
    "checkpointing/local/replication/strategies": "class CliqueReplicationStrategy: pass\n"
    "class ReplicationStrategy: pass\nclass NoReplicasAvailableError(Exception): pass",
}


def python(code: str, path: Path) -> str:
    return ran(sys.executable, "-W", "error", "-c", code, cwd=path, env=os.environ).stdout.strip()


def make_nvrx(path: Path) -> None:
    for name, content in NVRX.items():
        file = path / "nvidia_resiliency_ext" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content + "\n")


def make_core(path: Path) -> None:
    for package in ("megatron", "megatron/core", "megatron/core/dist_checkpointing"):
        (path / package).mkdir()
        (path / package / "__init__.py").touch()
    (path / "megatron/core/dist_checkpointing/tensor_aware_state_dict.py").write_text("HAVE_NVRX = False\n")


@pytest.mark.parametrize("has_nvrx", [False, True])
@pytest.mark.parametrize(("call", "factor", "expected"), [
    ("install()", 0, "none None"), ("install()", 2, "copy:1 None"), ("install(timeout_s=7)", 3, "copy:2 7"),
    ("install('xor:8')", 2, "xor:8 None"), ("install('rs:4+2')", 0, "rs:4+2 None"),
])  # fmt: skip
def test_megatron_makes_our_manager_of_its_flags(tmp_path: Path, has_nvrx: bool, call: str, factor: int, expected: str
                                                 ) -> None:  # fmt: skip
    if has_nvrx:
        make_nvrx(tmp_path)
    before = f"from mlflash.adapters.megatron import install\n{call}\n{call}\nFACTOR = {factor}\n"
    after = "import nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager as base\n"
    after += "assert issubclass(LocalCheckpoints, base.BaseCheckpointManager)\n"
    after += "assert issubclass(base.SameMachineReplicationException, base.CheckpointingException) and base.CkptID\n"
    after += "from nvidia_resiliency_ext.checkpointing.local.replication import strategies as found\n"
    after += "assert issubclass(found.NoReplicasAvailableError, Exception) and found.ReplicationStrategy\n"
    after += f"assert (parse_group_sequence == 'theirs') is {has_nvrx}\n"
    assert python(before + MAKE + after, tmp_path) == expected


@pytest.mark.parametrize("has_nvrx", [False, True])
@pytest.mark.parametrize(("call", "switch"), [("install(enabled=False)", ""), ("install('xor:8')", "1")])
def test_turned_off_it_leaves_nvrx_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_nvrx: bool, call: str, switch: str
) -> None:
    if has_nvrx:
        make_nvrx(tmp_path)
    monkeypatch.setenv("MLFLASH_DISABLE", switch)
    code = f"""
import os, sys, threading
from mlflash.adapters.megatron import LocalCheckpoints, install
{call}
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy
if {has_nvrx}:
    made = LocalCheckpointManager, CliqueReplicationStrategy
    assert all(one.__module__.startswith("nvidia_resiliency_ext") for one in made), made
else:
    manager = LocalCheckpointManager("run", repl_strategy=CliqueReplicationStrategy.from_replication_params(4, 2))
    assert manager.find_latest() == -1 and manager.save(object(), 3) is None and manager.find_latest() == -1
    request = manager.save(object(), 4, is_async=True)
    request.async_fn(*request.async_fn_args, **request.async_fn_kwargs)
    [one() for one in request.finalize_fns]
    manager.close()
assert "mpi4py.MPI" not in sys.modules and threading.active_count() == 1 and not os.path.exists("run")
print("well")
"""
    assert python(code, tmp_path) == "well"


def test_what_else_nvrx_has_is_still_missing_without_it(tmp_path: Path) -> None:
    """Megatron asks by importing, and goes another way. A core that was imported before makes its state dicts."""
    make_core(tmp_path)
    code = """
import importlib.util
from megatron.core.dist_checkpointing import tensor_aware_state_dict as core
from mlflash.adapters.megatron import install
install()
assert core.HAVE_NVRX and importlib.util.find_spec("nvidia_resiliency_ext") is not None
for name in ("inprocess", "fault_tolerance", "checkpointing.async_ckpt.core"):
    try:
        importlib.import_module("nvidia_resiliency_ext." + name)
    except ModuleNotFoundError:
        print("missing", end=" ")
"""
    assert python(code, tmp_path) == "missing missing missing"


def test_a_training_loop_of_ones_own_gets_a_context(tmp_path: Path) -> None:
    make_core(tmp_path)
    code = """
from mlflash.adapters.megatron import checkpointing_context
context = checkpointing_context("/local/run", "second", "xor:3", timeout_s=5)
manager = context["local_checkpoint_manager"]
print(manager.local_ckpt_dir, manager._settings["redundancy"], manager.find_latest.__name__)
from megatron.core.dist_checkpointing import tensor_aware_state_dict as core
assert core.HAVE_NVRX
"""
    assert python(code, tmp_path) == "/local/run/second/0 xor:3 find_latest"


# A worker waits for the end of a save, whichever way that comes


WAITS = "import pickle, sys; one = pickle.load(sys.stdin.buffer); print('waits', flush=True); one[0](*one[1])"


class Save:
    def __init__(self) -> None:
        self.snapshot = Snapshot(1, lambda: None)

    def request(self, timeout_s: float = 1000) -> Any:
        return request(self.snapshot.add_done_callback, self.snapshot.wait, timeout_s)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def started(program: str) -> subprocess.Popen[bytes]:
    """A Python that runs it, outside of the checkout."""
    return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/")


@contextlib.contextmanager
def worker(made: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does what a worker does with a request."""
    with started(WAITS) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(pickle.dumps((made.async_fn, made.async_fn_args)))
        process.stdin.close()
        assert process.stdout.readline() == b"waits\n"
        yield process


def has_open(pid: int, path: str) -> bool:
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it is closed just now
            if os.readlink(fd) == path:
                return True
    return False


def waits_until(save: Save, event: Callable[[], None]) -> None:
    """Let a worker wait for a save; nothing but the event ends it."""
    made = save.request()
    with worker(made) as process:
        until(lambda: has_open(process.pid, made.async_fn_args[0]), "the worker has the FIFO open")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        event()
        assert process.wait(60) == 0


@pytest.mark.parametrize("is_late", [False, True])
def test_a_worker_waits_for_the_end_and_no_longer(temporary: Path, is_late: bool) -> None:
    save, late = Save(), DeadlineExceeded("late")
    waits_until(save, lambda: save.snapshot.late(late) if is_late else save.snapshot.end(None))
    assert not any(temporary.iterdir())


def test_a_child_with_the_fifo_open_holds_no_worker_up(temporary: Path) -> None:
    save, held = Save(), []

    def end() -> None:
        held.append(os.open(next(temporary.rglob("*")), os.O_RDWR))  # as a data loader's worker has it by then
        save.snapshot.end(None)

    waits_until(save, end)
    os.close(held[0])


def test_a_save_that_has_ended_before_is_not_waited_for(temporary: Path) -> None:
    save = Save()
    made = save.request()
    save.snapshot.end(None)
    with worker(made) as process:
        assert process.wait(60) == 0
    wait_for(*save.request().async_fn_args)  # of a snapshot that is committed already
    assert not any(temporary.iterdir())


def test_a_worker_does_not_outlive_the_process_that_saves() -> None:
    made = "import sys\nfrom mlflash.adapters.megatron.request import request\n"
    made += "one = request(lambda call: None, print, 60)\nprint(one.async_fn_args[0], flush=True)\nsys.stdin.read()"
    with started(made) as saver:
        assert saver.stdout is not None
        path = saver.stdout.readline().decode().strip()
        waiter = threading.Thread(target=wait_for, args=(path, 1000))
        waiter.start()
        until(lambda: is_in(waiter, wait_for) and has_open(os.getpid(), path), "it waits")
        saver.kill()
        waiter.join(60)
        assert not waiter.is_alive()


def test_a_worker_gives_up_at_its_deadline() -> None:
    made, start = Save().request(timeout_s=0.2), time.monotonic()
    made.async_fn(*made.async_fn_args)
    assert time.monotonic() - start > 0.1
