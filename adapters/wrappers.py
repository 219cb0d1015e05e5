"""PyTorch's wrappers, DDP and FSDP2, when a rank was lost: they forget the step, and take the shards of other ranks.

A step is left in the middle because a collective failed. DDP's reducer waits for gradients that never come. DDP has no
public call for this, so it gets a new reducer, as unpickling does. FSDP2's modules still hold whole parameters,
unreduced gradients, and the order in which modules ran. Its public call is `FSDPModule.reset_iter_state`, since PyTorch
2.13; what that call does not expect is cleared before it.

If the number of ranks changes, a group of all ranks becomes a group of all ranks that are left. With HSDP, whose mesh
has rows of replicas, whole rows leave or come, so that the number of shards stays. FSDP2's modules get new parameters
with the shards of the new size, and optimizers get these parameters; the values of both are undefined afterwards, and
are restored. FSDP2 has no public call for this. It is done as `fully_shard` does it, with the same private functions.
"""

from __future__ import annotations

import collections
import gc
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

_GIVEN = "_mlflash_buckets"  # the attribute of a DDP that has the buckets of its reducer


def wrapped_models() -> list[nn.Module]:
    """All outermost modules of DDP and FSDP2 in this process."""
    modules = instances(DistributedDataParallel, FSDPModule)
    inside = {id(part) for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if id(module) not in inside]


def sort_key(model: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    """Give a key to sort models by, the same on all ranks. Models with the same key are interchangeable."""
    return [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]


def forget_step(model: nn.Module, buckets: Sequence[str] = ()) -> None:
    """Forget an unfinished step, in a model and all of its modules.

    Collective over the groups of DDP, whose reducer compares the ranks. With FSDP2 alone it is not collective.
    Afterwards parameters, optimizer and buffers have undefined values: restore them.

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
    for inner in state._state_ctx.all_states:
        for group in inner._fsdp_param_groups:
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


def let_go(module: FSDPModule) -> None:
    """Forget everything that FSDP2 knows about a module, which must not run again.

    The graph of an unfinished backward refers to it by hooks, which the garbage collector cannot see. If something of
    the module's trainer refers to that graph, all of them would stay forever.
    """
    state: Any = module._get_fsdp_state()
    for part in (*state._fsdp_param_groups, state):
        vars(part).clear()


def ranks_of(group: ProcessGroup) -> list[int]:
    """The ranks of the job that a group has, in its order."""
    return list(dist.distributed_c10d._world.pg_group_ranks[group])


def set_ranks(group: ProcessGroup, ranks: Iterable[int]) -> None:
    """Tell torch.distributed which ranks of the job a group has."""
    dist.distributed_c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}


def instances(*kinds: type) -> list[Any]:
    """All objects of some classes in this process."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kinds)]


def unit(groups: Iterable[ProcessGroup], models: Sequence[nn.Module]) -> int:
    """Return what the number of ranks must be a multiple of; 0: it cannot change. Not collective.

    It cannot change if FSDP2 uses other meshes than one or two dimensions of all ranks, or cuts other dimensions than
    the first one; if there are other groups of some ranks, or distributed tensors that are neither parameters of FSDP2
    nor values of an optimizer.
    """
    size, meshes = dist.get_world_size(), meshes_of(models)
    if any(mesh.ndim > 2 or mesh.mesh.flatten().tolist() != list(range(size)) for mesh in meshes):
        return 0
    for param_group in _param_groups(models):
        if param_group.post_forward_mesh_info not in (None, param_group.mesh_info):
            return 0
        if any(parameter.fsdp_placement.dim for parameter in param_group.fsdp_params):  # it must divide evenly
            return 0
    names = {name for mesh in meshes for name in mesh._dim_group_names}
    if any(group.size() != size and group.group_name not in names for group in groups):
        return 0
    if _has_strangers(models):
        gc.collect()  # what the interrupted step has left may be in cycles
        if _has_strangers(models):
            return 0
    rows = {mesh.size(1) for mesh in meshes if mesh.ndim == 2}
    return 0 if len(rows) > 1 else rows.pop() if rows else 1


def _has_strangers(models: Sequence[nn.Module]) -> bool:
    """Whether there are distributed tensors that `reshard` does not know."""
    if not (tensors := instances(DTensor)):
        return False
    parameters = [parameter.sharded_param for group in _param_groups(models) for parameter in group.fsdp_params]
    known = {id(tensor) for parameter in parameters for tensor in (parameter, parameter.grad)}
    for optimizer in instances(Optimizer):
        known |= {id(value) for values in optimizer.state.values() for value in values.values()}
    return any(id(tensor) not in known for tensor in tensors)


def place(group: ProcessGroup, meshes: Sequence[DeviceMesh], rank: int, size: int) -> tuple[int, list[int]]:
    """Return the rank that this process has in a group, and the group's ranks, when the job has another size.

    Args:
        meshes: those of FSDP2.
        rank, size: of this process in the job, then.
    """
    for mesh in meshes:
        if mesh.ndim == 2 and group.group_name in mesh._dim_group_names:
            row = mesh.size(1)
            if mesh._dim_group_names.index(group.group_name) == 0:
                return rank // row, list(range(rank % row, size, row))
            return rank % row, list(range(rank // row * row, rank // row * row + row))
    return rank, list(range(size))


def forget_meshes() -> None:
    """Let torch forget where this rank was in its meshes. Not collective.

    Meshes are equal if they have the same ranks, and torch keeps one of them in the place of all. So each must have the
    place in it that this rank has now.
    """
    rank = dist.get_rank()
    for mesh in instances(DeviceMesh):
        mesh._rank = rank
        mesh._coordinate_on_dim = mesh._compute_coordinate_on_dim()
    _clear_sharding_prop_cache()


def reshard(models: Iterable[nn.Module]) -> None:
    """Give FSDP2's modules the shards that they have in groups whose ranks have changed. Not collective.

    The modules must be between two steps. Parameters and what optimizers hold have undefined values afterwards.
    """
    infos: dict[int, Any] = {}  # by the description of the mesh before
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for group in _param_groups(models):
        before = group.mesh_info
        if id(before) not in infos:
            infos[id(before)] = before, _renewed(before)
        group.mesh_info = infos[id(before)][1]
        if group.post_forward_mesh_info is not None:
            group.post_forward_mesh_info = group.mesh_info
        for parameter in group.fsdp_params:
            sharded = parameter.sharded_param
            _reshard(parameter, group.mesh_info, group.post_forward_mesh_info)
            replaced[id(sharded)] = sharded, parameter.sharded_param
    for optimizer in instances(Optimizer) if replaced else ():
        for group in optimizer.param_groups:
            group["params"] = [replaced[id(each)][1] if id(each) in replaced else each for each in group["params"]]
        optimizer.state = collections.defaultdict(
            dict, {each: values for each, values in optimizer.state.items() if id(each) not in replaced}
        )


def _param_groups(models: Iterable[nn.Module]) -> list[Any]:
    """The groups of parameters that FSDP2 gathers together."""
    modules: list[Any] = [module for model in models for module in model.modules() if isinstance(module, FSDPModule)]
    return [group for module in modules for group in module._get_fsdp_state()._fsdp_param_groups]


def meshes_of(models: Iterable[nn.Module]) -> list[DeviceMesh]:
    """The meshes of FSDP2."""
    return list({id(group.mesh_info): group.mesh_info.mesh for group in _param_groups(models)}.values())


def _renewed(info: Any) -> Any:
    """Describe a mesh of FSDP2 anew, with the ranks that its groups have now."""
    mesh: DeviceMesh = info.mesh
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    if mesh.ndim == 1:
        renewed = DeviceMesh.from_group(groups[0], mesh.device_type, mesh_dim_names=mesh.mesh_dim_names)
    else:
        ranks = torch.arange(math.prod(group.size() for group in groups)).view(groups[0].size(), groups[1].size())
        names = mesh.mesh_dim_names or ("replicas", "shards")
        renewed = DeviceMesh.from_group(groups, mesh.device_type, ranks, mesh_dim_names=names)
    return type(info)(renewed, shard_mesh_dim=info.shard_mesh_dim, replicate_mesh_dim=info.replicate_mesh_dim)


def _reshard(parameter: Any, info: Any, post_forward_info: Any) -> None:
    sharded = parameter.sharded_param
    whole = nn.Parameter(torch.empty(parameter._orig_size, dtype=sharded.dtype, device=parameter.device),
                         requires_grad=sharded.requires_grad)  # fmt: skip
    parameter._init_sharded_param(whole, parameter.device, lambda _: parameter.fsdp_placement, info)
    parameter.post_forward_mesh_info = post_forward_info
    if post_forward_info is not None:
        parameter._init_sharded_post_forward_param_metadata(whole)
    parameter._init_extensions()
    parameter.all_gather_outputs = []  # their size follows from the number of shards
    vars(parameter).pop("_unsharded_param", None)
