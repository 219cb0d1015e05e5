"""NeMo 2.x (`nemo.lightning`): checkpoints in the memory of the nodes, between those that NeMo writes.

Names and arguments are those of ML Flashpoint's adapter, with ``mlflash`` instead of its name.

    callback        `MLFlashCheckpointCallback`, which decides when to save
    checkpoint_io   send paths below the base container to memory, and all others to NeMo
    memory          save and load the sharded state of a `MegatronStrategy` in slots
    auto_resume     choose the checkpoint to start from
    wrap            put all of this into a trainer

Example:
    from mlflash.adapters.nemo import MLFlashCheckpointCallback, wrap_trainer_and_auto_resume_with_mlflash

    flash = MLFlashCheckpointCallback("/tmp/mlflash/job-145", every_n_steps=10, skip_every_n_steps=500)
    trainer = nl.Trainer(strategy=nl.MegatronStrategy(...), callbacks=[flash, ...], ...)
    resume = wrap_trainer_and_auto_resume_with_mlflash(trainer, "/tmp/mlflash/job-145", async_save=True,
                                                       default_auto_resume=resume)
    llm.train(model, data, trainer, log=log, resume=resume)
"""

from .auto_resume import MLFlashAutoResume
from .callback import MLFlashCheckpointCallback
from .checkpoint_io import MLFlashAsyncFinalizableCheckpointIO, MLFlashCheckpointIO
from .wrap import wrap_trainer_and_auto_resume_with_mlflash

__all__ = ["MLFlashAsyncFinalizableCheckpointIO", "MLFlashAutoResume", "MLFlashCheckpointCallback",
           "MLFlashCheckpointIO", "wrap_trainer_and_auto_resume_with_mlflash"]  # fmt: skip
