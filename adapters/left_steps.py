"""Let PyTorch's wrappers forget a step that was left in the middle.

If a rank is lost, a collective fails and raises an error out of forward or backward. Then DDP's reducer waits for
gradients that never come. FSDP2's modules still hold whole parameters, unreduced gradients, and the order in which
modules ran. This module makes a new reducer for DDP, as unpickling does; DDP has no public call for this. FSDP2 has
had one since PyTorch 2.13, `FSDPModule.reset_iter_state`. What that call does not expect is cleared before it.

Afterwards parameters, optimizer and buffers have undefined values: restore them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

_GIVEN = "_mlflash_buckets"


def forget_step(model: nn.Module, buckets: Sequence[str] = ()) -> None:
    """Forget an unfinished step, in a model and all of its modules.

    Collective over the groups of DDP, whose reducer compares the ranks. With FSDP2 alone it is not collective.

    Args:
        model: a model that an exception may have interrupted in forward or backward. Its gradients become None.
        buckets: the buckets of each DDP in the model (`buckets_of`), the same on all ranks. Without them a new reducer
            would change the order of gradients after its first step, so that sums of that step are rounded otherwise.
            If buckets are missing or "", torch chooses them.
    """
    given = iter(buckets)
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            _make_reducer(module, next(given, ""))
        elif isinstance(module, FSDPModule):
            _forget_shards(module)
    for parameter in model.parameters():
        parameter.grad = None


def buckets_of(model: nn.Module) -> list[str]:
    """Give the order in which each DDP in a model sends gradients, as torch writes it. "" before it is fixed."""
    modules = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    # A new reducer does not report it before its third step, but it uses the buckets that it was given.
    return [str(module._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices") or getattr(module, _GIVEN, ""))
            for module in modules]  # fmt: skip


def _make_reducer(module: DistributedDataParallel, buckets: str) -> None:
    parameters, are_sparse = module._build_params_for_reducer()
    names = module._build_debug_param_to_name_mapping(parameters)
    choose = dist._compute_bucket_assignment_by_size
    setattr(module, _GIVEN, buckets)
    given = [[int(number) for number in bucket.split()] for bucket in buckets.split(",") if bucket.strip()]
    if given:  # torch reads them from last to first
        dist._compute_bucket_assignment_by_size = lambda *_: (given[::-1], [module.bucket_bytes_cap] * len(given))
    try:
        module._ddp_init_helper(parameters, are_sparse, names, module.static_graph)
    finally:
        dist._compute_bucket_assignment_by_size = choose
    if module.static_graph:
        module.reducer._set_static_graph()


def _forget_shards(module: FSDPModule) -> None:
    state: Any = module._get_fsdp_state()
    if not state._is_root:  # its root does it, or it has never run
        return
    for unit in state._state_ctx.all_states:
        for group in unit._fsdp_param_groups:
            group._all_gather_result = None  # its collective has failed: waiting for it would raise the error again
            for parameter in group.fsdp_params:
                _forget_gradient(parameter)
    module.reset_iter_state()


def _forget_gradient(parameter: Any) -> None:
    """Forget the gradient of a whole parameter. PyTorch does this itself since 2.15."""
    if hasattr(parameter, "_unsharded_param"):  # otherwise this rank has not used it
        parameter._unsharded_param.grad = None
    if "unsharded_accumulated_grad" in vars(parameter):  # in 2.15 it is the gradient above, under another name
        parameter.unsharded_accumulated_grad = None
