"""PyTorch Distributed Checkpoint: `dcp.save`, `dcp.async_save` and `dcp.load` to and from the memory of the nodes.

    leaves    what a plan writes ↔ the leaves of a slot, and their index
    staged    a state dict in a slot before anything is planned: `dcp.async_save` copies once
    process   the child of `async_checkpointer_type=PROCESS` asks its parent
    writer    plan → slot → commit
    reader    slots → plan

Example:
    with Checkpointer(directory) as ckpt:
        writer, reader = MemoryWriter(ckpt), MemoryReader(ckpt)
        if (newest := latest(ckpt)) is not None:
            dcp.load(state_dict, checkpoint_id=newest, storage_reader=reader)
        future = dcp.async_save(state_dict, checkpoint_id="step-00000100", storage_writer=writer)
"""

from ..ids import step_of
from .reader import MemoryReader, SafeLoadPlanner, latest
from .writer import MemoryWriter

__all__ = ["MemoryReader", "MemoryWriter", "SafeLoadPlanner", "latest", "step_of"]
