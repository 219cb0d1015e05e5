"""PyTorch's tests of DCP: `MemoryWriter` and `MemoryReader` stand in for FileSystemWriter and FileSystemReader.

Those that write and read by these; not those of other formats and stores (Hugging Face's, fsspec, `format_utils`), of
planners, stagers and state dicts alone, and of writers of their own that fail; nor what compiles for a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from cuda_on_cpu import CPU, devices, pretend

from .suite import Suite

_FILES = (
    "test_file_system_checkpoint_cpu", "test_dtensor_checkpoint", "test_dtensor_resharding", "test_tp_checkpoint",
    "test_hsdp_checkpoint", "test_fsdp_model_state", "test_fsdp_optim_state", "test_fsdp_tp_checkpoint_conversion",
    "test_2d_fsdp_dt_checkpoint", "test_compatibility", "test_save_load_api", "e2e/test_e2e_save_and_load",
)  # fmt: skip
SUITE = Suite("pytorch", "PyTorch, DCP", "pytorch",
              (*(f"test/distributed/checkpoint/{name}.py" for name in _FILES),
               "-k", "not test_no_cpu and not compile_True"),
              package="torch", paths=(), limit_s=3600)  # fmt: skip


def around() -> contextlib.AbstractContextManager[None]:
    """What it takes to run them here: tests that ask for GPUs are not skipped; over gloo, and with FSDP on CPUs."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed._tensor import common_dtensor

    def asks_for_gpus(count: int, **more: Any) -> Callable[[Any], Any]:
        return lambda test: test

    init = common_dtensor.DTensorTestBase.init_pg

    def over_gloo(test: Any, *args: Any, **kwargs: Any) -> None:
        init(test, False, "gloo")

    make, move = FullyShardedDataParallel.__init__, torch.nn.Module.to

    def on_cpu(model: Any, *args: Any, **kwargs: Any) -> None:
        make(model, *args, **{"device_id": CPU, **kwargs})

    def to_cpu(model: Any, *args: Any, **kwargs: Any) -> Any:
        return move(model, *(CPU if type(argument) is int else argument for argument in args), **kwargs)

    more = [(module, "skip_if_lt_x_gpu", asks_for_gpus) for module in (common_distributed, common_dtensor)]
    more += [(common_dtensor.DTensorTestBase, "init_pg", over_gloo), (FullyShardedDataParallel, "__init__", on_cpu),
             (torch.nn.Module, "to", to_cpu)]  # fmt: skip
    return pretend([*devices(4), *more])


def put_in_place() -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import _storage_utils, filesystem

    from . import dcp_parts

    for module in (dcp, filesystem, _storage_utils):
        module.FileSystemWriter, module.FileSystemReader = dcp_parts.FileSystemWriter, dcp_parts.FileSystemReader
    destroy = dist.destroy_process_group

    def close_and_destroy(group: Any = None) -> None:
        if group is None:
            dcp_parts.close_all()
        destroy(group)

    dist.destroy_process_group = close_and_destroy


def after_test() -> None:
    from . import dcp_parts

    dcp_parts.close_all()
