"""What Megatron finds of NVRx after `install()`, with NVRx and without; each case in a Python of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=path)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


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
@pytest.mark.parametrize(
    ("call", "factor", "made"),
    [
        ("install()", 0, "none None"),
        ("install()", 2, "copy:1 None"),
        ("install(timeout_s=7)", 3, "copy:2 7"),
        ("install('xor:8')", 2, "xor:8 None"),
        ("install('rs:4+2')", 0, "rs:4+2 None"),
    ],
)
def test_megatron_makes_our_manager_of_its_flags(
    tmp_path: Path, has_nvrx: bool, call: str, factor: int, made: str
) -> None:
    if has_nvrx:
        make_nvrx(tmp_path)
    before = f"from mlflash.adapters.megatron import install\n{call}\n{call}\nFACTOR = {factor}\n"
    after = "import nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager as base\n"
    after += "assert issubclass(LocalCheckpoints, base.BaseCheckpointManager)\n"
    after += "assert issubclass(base.SameMachineReplicationException, base.CheckpointingException) and base.CkptID\n"
    after += "from nvidia_resiliency_ext.checkpointing.local.replication import strategies as found\n"
    after += "assert issubclass(found.NoReplicasAvailableError, Exception) and found.ReplicationStrategy\n"
    after += f"assert (parse_group_sequence == 'theirs') is {has_nvrx}\n"
    assert python(before + MAKE + after, tmp_path) == made


@pytest.mark.parametrize("has_nvrx", [False, True])
@pytest.mark.parametrize(("call", "switch"), [("install(enabled=False)", ""), ("install('xor:8')", "1")])
def test_turned_off_it_leaves_nvrx_alone_and_without_it_local_checkpoints_are_none(
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
    """Megatron asks by importing, and goes another way."""
    code = """
import importlib.util
from mlflash.adapters.megatron import install
install()
assert importlib.util.find_spec("nvidia_resiliency_ext") is not None
for name in ("inprocess", "fault_tolerance", "checkpointing.async_ckpt.core"):
    try:
        importlib.import_module("nvidia_resiliency_ext." + name)
    except ModuleNotFoundError:
        print("missing", end=" ")
"""
    assert python(code, tmp_path) == "missing missing missing"


def test_a_core_that_was_imported_before_makes_its_state_dicts_all_the_same(tmp_path: Path) -> None:
    make_core(tmp_path)
    code = """
from megatron.core.dist_checkpointing import tensor_aware_state_dict as theirs
from mlflash.adapters.megatron import install
install()
print(theirs.HAVE_NVRX)
"""
    assert python(code, tmp_path) == "True"


def test_a_training_loop_of_ones_own_gets_a_context(tmp_path: Path) -> None:
    make_core(tmp_path)
    code = """
from mlflash.adapters.megatron import checkpointing_context
context = checkpointing_context("/local/run", "second", "xor:3", timeout_s=5)
manager = context["local_checkpoint_manager"]
print(manager.local_ckpt_dir, manager._settings["redundancy"], manager.find_latest.__name__)
from megatron.core.dist_checkpointing import tensor_aware_state_dict as theirs
assert theirs.HAVE_NVRX
"""
    assert python(code, tmp_path) == "/local/run/second/0 xor:3 find_latest"
