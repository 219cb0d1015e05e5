"""Hugging Face Trainer: checkpoints in the memory of the nodes, between those that the Trainer writes.

    flash      a callback that decides when to save and what to start from, and saves
    states     convert what a Trainer holds to a state for the slots
    engines    the state if DeepSpeed trains

Example:
    from mlflash.adapters.transformers import TrainerWrapper

    trainer = TrainerWrapper(Trainer(model, args, train_dataset=rows), save_mem_interval=10)
    trainer.train(resume_from_checkpoint=True)  # the newest of memory and disk; a fresh start if there is none
"""

from .flash import MLFlashCallback, TrainerWrapper

__all__ = ["MLFlashCallback", "TrainerWrapper"]
