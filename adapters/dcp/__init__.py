"""PyTorch Distributed Checkpoint (DCP): `dcp.save`, `dcp.async_save` and `dcp.load` with the memory of the nodes.

    staged    copy a state dict into a slot before anything is planned, so that `dcp.async_save` copies once
    process   the child process of `async_checkpointer_type=PROCESS` sends requests to its parent
    writer    write what a plan names into a slot, and commit it
    reader    read what a plan names from slots

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
