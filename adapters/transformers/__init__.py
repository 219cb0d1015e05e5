"""Hugging Face Trainer: checkpoints in the memory of the nodes, between those that the Trainer writes.

    flash      a callback that decides when to save, and saves
    start      choose the newest checkpoint of memory and disk to start from
    states     convert what a Trainer holds to a state for the slots
    own_files  move the Trainer's own checkpoints to disk in the background
    engines    the state if DeepSpeed trains
    backends   choose the kind of state by what trains the model

Example:
    from mlflash.adapters.transformers import TrainerWrapper

    trainer = TrainerWrapper(Trainer(model, args, train_dataset=rows), save_mem_interval=10)
    trainer.train(resume_from_checkpoint=True)  # the newest of memory and disk; a fresh start if there is none
"""

from .flash import MLFlashCallback, TrainerWrapper

__all__ = ["MLFlashCallback", "TrainerWrapper"]
