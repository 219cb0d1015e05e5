"""Write what saves cost as scalars to TensorBoard, or to any object with ``add_scalar(name, value, step)``."""

from __future__ import annotations

from typing import Any

from mlflash import Snapshot


class Scalars:
    """Writes seconds and bytes of each checkpoint. Usually one rank has it, the first.

    Args:
        writer: for example a `torch.utils.tensorboard.SummaryWriter`.
    """

    def __init__(self, writer: Any):
        self._writer, self._open = writer, list[Snapshot]()

    def add(self, snapshot: Snapshot) -> None:
        """Add a snapshot that `save` returned, and write those that have ended. Not collective; it does not wait."""
        self._open.append(snapshot)
        self.write()

    def write(self) -> None:
        """Write the snapshots that have ended. Not collective.

        Also call it at the end of training, after `Checkpointer.wait`.
        """
        ended = [snapshot for snapshot in self._open if snapshot.done]
        self._open = [snapshot for snapshot in self._open if snapshot not in ended]
        for snapshot in ended:
            values = {"stall_s": snapshot.stall_s, "commit_s": snapshot.commit_s, "nbytes": snapshot.nbytes}
            for name, value in {**values, "failed": not snapshot.committed}.items():
                if value is not None:
                    self._writer.add_scalar(f"mlflash/{name}", float(value), snapshot.step)
