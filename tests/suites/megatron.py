"""Megatron-LM's tests of local checkpoints: `install` puts `LocalCheckpoints` in the place of NVRx's manager.

On 4 ranks without tensor and pipeline parallelism; the others want 8 ranks, all those of replication among them.
"""

from __future__ import annotations

import contextlib
import sys
import types

from cuda_on_cpu import devices

from .suite import Suite

SUITE = Suite(
    "megatron", "Megatron-LM, local checkpoints", "Megatron-LM",
    ("tests/unit_tests/dist_checkpointing/test_local.py", "-k", "not 2-4"),
    paths=("", "../nvidia-resiliency-ext*/src"), ranks=4,
)  # fmt: skip
_DATA = "tests.test_utils.python_scripts.download_unit_tests_dataset"


def around() -> contextlib.AbstractContextManager[None]:
    """What it takes to run them here; data that other tests of theirs want is not downloaded."""
    with contextlib.suppress(ModuleNotFoundError):  # then there is what `install` makes of it
        import nvidia_resiliency_ext

        nvidia_resiliency_ext.__version__ = "0.7.0"  # of a checkout it is unknown, and Megatron compares it
    from megatron_on_cpu import OptimizerConfig, on_cpu

    check = OptimizerConfig.__post_init__

    def with_rate(config: OptimizerConfig) -> None:
        config.lr = config.lr or 1e-3  # the tests give none, which PyTorch's Adam refuses
        check(config)

    sys.modules[_DATA] = types.ModuleType(_DATA)
    sys.modules[_DATA].download_and_extract_asset = lambda assets_dir: False  # type: ignore[attr-defined]
    return on_cpu([*devices(), (OptimizerConfig, "__post_init__", with_rate)])


def put_in_place() -> None:
    from mlflash.adapters.megatron import install

    install(timeout_s=60)
