"""DeepSpeed: checkpoints of an engine in the memory of the nodes, ZeRO 0 to 3.

    files    convert what an engine writes to files to a state for the slots, with a CheckpointEngine in memory
    flash    decide when and where an engine is saved, and which checkpoint it starts from

Example:
    from mlflash.adapters.deepspeed import attach

    with attach(engine, every_n_steps=10, directory="/lustre/run42/mlflash") as flash:
        _, client_state = engine.load_checkpoint("/lustre/run42")  # the newest of memory and disk
        while engine.global_steps < 1000:
            ...
            engine.step()
            flash.save_if_needed({"seen": seen})
"""

from .files import EngineState, MemoryCheckpointEngine, alike
from .flash import Flash, attach

__all__ = ["EngineState", "Flash", "MemoryCheckpointEngine", "alike", "attach"]
