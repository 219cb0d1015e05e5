"""PyTorch Lightning: checkpoints in the memory of the nodes, between those that Lightning writes.

    flash      when to save and what, and which checkpoint to start from: the hooks of a callback
    loops      where a step ends, and how to go on behind one
    resume     random numbers and data loaders, as they were
    own_files  Lightning's own checkpoints, moved to their place behind training
    states     what a strategy holds ↔ a state for the slots
    checkpoint_io   memory under paths of its own, as for a test of the model
    packages   the two names of Lightning

It serves `lightning` and, under the package's older name, `pytorch_lightning`.

Example:
    from mlflash.adapters.lightning import MLFlashCallback

    flash = MLFlashCallback(every_n_steps=10, directory="/lustre/run42/mlflash")
    trainer = Trainer(callbacks=[flash, ModelCheckpoint("/lustre/run42", save_last=True)], strategy="ddp")
    trainer.fit(model, ckpt_path="last")  # or the one in memory, where that is newer
"""

from .checkpoint_io import MemoryIO
from .flash import Flash
from .packages import modules


def _named(name: str, own: type, bases: list[type]) -> type:
    return type(name, (own, *bases), {"__module__": __name__, "__doc__": own.__doc__})


MLFlashCallback = _named("MLFlashCallback", Flash, [module.Callback for module in modules("callbacks")])
MLFlashCheckpointIO = _named("MLFlashCheckpointIO", MemoryIO, [module.CheckpointIO for module in modules("plugins")])

__all__ = ["MLFlashCallback", "MLFlashCheckpointIO"]
