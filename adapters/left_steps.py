"""Let PyTorch's wrappers forget a step that was left in the middle.

If a rank is lost, a collective fails and raises an error out of forward or backward. Then DDP's reducer waits for
gradients that never come. FSDP2's modules still hold whole parameters, unreduced gradients, and the order in which
modules ran. This module makes a new reducer for DDP, as unpickling does, and puts FSDP2 back to its state between
steps. Neither has a public call for this, so it uses attributes of PyTorch 2.11 and 2.13. A missing attribute raises an
error.

Afterwards parameters, optimizer and buffers have undefined values: restore them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
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
    found = [one for one in model.modules() if isinstance(one, DistributedDataParallel)]
    # A new reducer does not report it before its third step, but it uses the buckets that it was given.
    return [str(one._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices") or getattr(one, _GIVEN, ""))
            for one in found]  # fmt: skip


def _make_reducer(module: DistributedDataParallel, buckets: str) -> None:
    parameters, are_sparse = module._build_params_for_reducer()
    names = module._build_debug_param_to_name_mapping(parameters)
    choose = dist._compute_bucket_assignment_by_size
    setattr(module, _GIVEN, buckets)
    given = [[int(number) for number in one.split()] for one in buckets.split(",") if one.strip()]
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
    if state._is_root is None:  # it has never run
        return
    state._training_state = TrainingState.IDLE
    state._modules_to_run_forward.clear()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    for group in groups_of(state):
        group._training_state = TrainingState.IDLE
        group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
        group._reshard_after_forward_event = group._partial_reduce_output = None
        group._post_forward_indices.clear()
        shared = group.comm_ctx
        shared.all_gather_state = None
        if hasattr(shared, "reduce_scatter_state"):  # before PyTorch 2.13
            shared.reduce_scatter_state = None
        else:
            shared.reduce_scatter_states.clear()
            shared._last_post_reduce_events.clear()
        shared.post_forward_order.clear()
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
        group._to_sharded()


def groups_of(state: Any) -> list[Any]:
    """Give the groups of parameters that a module of FSDP2 gathers. Before PyTorch 2.13 there was at most one."""
    if not hasattr(state, "_fsdp_param_groups"):
        return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    groups: list[Any] = state._fsdp_param_groups
    return groups
