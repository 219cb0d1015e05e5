"""Local, sharded and full state of FSDP models, with the calls of SageMaker's SMP library.

    states        make and load state dicts of model and optimizer: local, sharded, full
    groups        find out which ranks hold the same shard, and give process groups their own Checkpointer
    checkpoints   async_save, maybe_finalize_async_calls, load

Example:
    checkpoints = fsdp.Checkpoints("/scratch/run1", redundancy="copy")
    init_optim_state(optimizer)
    state = local_state_dict(model, optimizer)
    checkpoints.load(state, f"tp0_ep0_fsdp{shard}", process_group=replicas,
                     then=lambda: load_local_state_dict(model, optimizer, state))
    ...
    checkpoints.async_save(local_state_dict(model, optimizer), f"step-{step}/tp0_ep0_fsdp{shard}", replicas)
    checkpoints.maybe_finalize_async_calls()
"""

from .checkpoints import Checkpoints, DistributedFileSystemReader
from .groups import Ranker
from .states import (
    full_state_dict,
    init_optim_state,
    load_local_state_dict,
    load_sharded_state_dict,
    local_state_dict,
    sharded_state_dict,
)

__all__ = ["Checkpoints", "DistributedFileSystemReader", "Ranker", "full_state_dict", "init_optim_state",
           "load_local_state_dict", "load_sharded_state_dict", "local_state_dict", "sharded_state_dict"]  # fmt: skip
