"""PyTorch Lightning: checkpoints in the memory of the nodes, between those that Lightning writes.

    flash           the hooks of a callback: decide when to save, and which checkpoint to start from
    loops           find where a step ends in Lightning's loops, and continue after one
    states          convert what a strategy holds to a state for the slots
    checkpoint_io   give checkpoints in memory paths, for example to test the model
    packages        the two names of the Lightning package

It works with `lightning` and with `pytorch_lightning`, the older name of the package.

Example:
    from mlflash.adapters.lightning import MLFlashCallback

    flash = MLFlashCallback(every_n_steps=10, directory="/lustre/run42/mlflash")
    trainer = Trainer(callbacks=[flash, ModelCheckpoint("/lustre/run42", save_last=True)], strategy="ddp")
    trainer.fit(model, ckpt_path="last")  # or the one in memory, if that is newer
"""

from .checkpoint_io import MemoryIO
from .flash import Flash
from .packages import modules


def _named(name: str, own: type, bases: list[type]) -> type:
    return type(name, (own, *bases), {"__module__": __name__, "__doc__": own.__doc__})


MLFlashCallback = _named("MLFlashCallback", Flash, [module.Callback for module in modules("callbacks")])
MLFlashCheckpointIO = _named("MLFlashCheckpointIO", MemoryIO, [module.CheckpointIO for module in modules("plugins")])

__all__ = ["MLFlashCallback", "MLFlashCheckpointIO"]
