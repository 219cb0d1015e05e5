"""Hugging Face Trainer: checkpoints in the memory of the nodes, between those that the Trainer writes.

    flash      when to save, and the training in which that happens: a callback
    start      which checkpoint to start from: of memory and disk the newest
    states     what a Trainer holds ↔ a state for the slots
    own_files  the Trainer's own checkpoints, moved to disk behind training
    engines    the same where DeepSpeed trains
    backends   which of both it is

Example:
    from mlflash.adapters.transformers import TrainerWrapper

    trainer = TrainerWrapper(Trainer(model, args, train_dataset=rows), save_mem_interval=10)
    trainer.train(resume_from_checkpoint=True)  # the newest of memory and disk; a fresh start where there is none
"""

from .flash import MLFlashCallback, TrainerWrapper

__all__ = ["MLFlashCallback", "TrainerWrapper"]
