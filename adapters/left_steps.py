"""What PyTorch's wrappers keep of a step that was left in the middle, and how they are told to forget it.

A collective that fails as a rank is lost raises out of forward or backward. DDP's reducer then waits for gradients that
never come, and FSDP2's modules hold whole parameters, gradients that were not reduced, and the order in which modules
ran. DDP has its reducer made anew, as where it is unpickled; FSDP2 is put back to where it is between steps. Both have
no public call for it: the attributes are those of PyTorch 2.11 and 2.13, and one that is missing is an error.

Parameters, optimizer and buffers hold anything then: they are to be restored after it.
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
    """Forget what was begun of a step, in a model and all of its modules.

    Collective over the groups of DDP, whose reducer compares what ranks have; not with FSDP2 alone.

    Args:
        model: that may have left forward or backward by an exception; its gradients are None then.
        buckets: of each DDP in it (`buckets_of`), the same on all ranks: a new reducer would order gradients anew after
            its first step, and so round that step's sums otherwise. What is not there, or "", is left to torch.
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
    """Give the order in which each DDP in a model sends gradients, as torch writes it; "" before it is settled."""
    found = [one for one in model.modules() if isinstance(one, DistributedDataParallel)]
    # A new reducer does not say so before its third step, but has what it was given.
    return [str(one._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices") or getattr(one, _GIVEN, ""))
            for one in found]  # fmt: skip


def _make_reducer(module: DistributedDataParallel, buckets: str) -> None:
    parameters, are_sparse = module._build_params_for_reducer()
    names = module._build_debug_param_to_name_mapping(parameters)
    choose = dist._compute_bucket_assignment_by_size
    setattr(module, _GIVEN, buckets)
    given = [[int(number) for number in one.split()] for one in buckets.split(",") if one.strip()]
    if given:  # torch takes them from the last one to the first
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
    """Give the groups of parameters that a module of FSDP2 gathers; before PyTorch 2.13 it had one at most."""
    if not hasattr(state, "_fsdp_param_groups"):
        return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    groups: list[Any] = state._fsdp_param_groups
    return groups
