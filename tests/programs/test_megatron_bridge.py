"""Which manager Megatron Bridge makes of its settings, without Bridge; tests/faults/test_megatron.py trains with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# As in megatron.bridge.training.checkpointing, without what it saves.
CHECKPOINTING = """
import importlib
from megatron.bridge.utils.instantiate_utils import ALLOWED

class DefaultCheckpointManager:
    def __init__(self, checkpoint_config):
        assert checkpoint_config.non_persistent_ckpt_type != "local", "NVRx is not installed"
        self._context = {}

    @property
    def checkpointing_context(self):
        return self._context

    def save(self, ctx, callback_manager):
        return "saved by Bridge"


def create_checkpoint_manager(config):
    if config.custom_manager_class is None:
        return DefaultCheckpointManager(config)
    assert any(map(config.custom_manager_class.startswith, ALLOWED)), "not in the allowlist"
    module, _, name = config.custom_manager_class.rpartition(".")
    return getattr(importlib.import_module(module), name)(config)
"""
USE = """
import types
from megatron.bridge.training.checkpointing import create_checkpoint_manager
from mlflash.adapters import megatron_bridge

def made(kind, replication, **settings):
    config = types.SimpleNamespace(non_persistent_ckpt_type=kind, non_persistent_local_ckpt_dir="run42",
                                   replication=replication, replication_jump=4, replication_factor=3,
                                   custom_manager_class=None)
    megatron_bridge.use(config, **settings)
    made = create_checkpoint_manager(config)
    assert made.save(None, None) == "saved by Bridge"
    manager = made.checkpointing_context.get("local_checkpoint_manager")
    if manager is not None:
        return manager._settings["redundancy"], manager._settings.get("timeout_s"), str(manager.local_ckpt_dir)

assert made("local", True) == ("copy:2", None, "run42/0")
assert made("local", False) == ("none", None, "run42/0")
assert made("local", False, redundancy="xor:4", timeout_s=9) == ("xor:4", 9, "run42/0")
assert made("global", False) is None
assert made(None, False, redundancy="copy") is None
assert made("global", False, enabled=False) is None
# NVRx is not installed: Bridge could not make a manager of its own, and ours saves nothing.
assert made("local", True, enabled=False) == ("copy:2", None, "run42/0")
"""


def test_bridge_makes_a_manager_with_our_local_checkpoints(tmp_path: Path) -> None:
    packages = ("", "core/", "core/dist_checkpointing/", "bridge/", "bridge/training/", "bridge/utils/")
    files = {f"megatron/{package}__init__.py": "" for package in packages} | {
        "megatron/core/dist_checkpointing/tensor_aware_state_dict.py": "HAVE_NVRX = False\n",
        "megatron/bridge/training/checkpointing.py": CHECKPOINTING,
        "megatron/bridge/utils/instantiate_utils.py": "ALLOWED = []\nregister_allowed_target_prefix = ALLOWED.append\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-W", "error", "-c", USE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
