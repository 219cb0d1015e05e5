"""What saves cost, as scalars of TensorBoard, or of whatever has ``add_scalar(name, value, step)``."""

from __future__ import annotations

from typing import Any

from mlflash import Snapshot


class Scalars:
    """Writes seconds and bytes of each checkpoint; for one rank, as a rule the first.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`, say.
    """

    def __init__(self, writer: Any):
        self._writer, self._open = writer, list[Snapshot]()

    def add(self, snapshot: Snapshot) -> None:
        """Note what `save` gave, and write those that have ended. Not collective; it waits for nothing."""
        self._open.append(snapshot)
        self.write()

    def write(self) -> None:
        """Write those that have ended, at the end of training too: `Checkpointer.wait` comes before. Not collective."""
        ended = [one for one in self._open if one.done]
        self._open = [one for one in self._open if one not in ended]
        for one in ended:
            values = {
                "stall_s": one.stall_s,
                "commit_s": one.commit_s,
                "nbytes": one.nbytes,
                "failed": not one.committed,
            }
            for name, value in values.items():
                if value is not None:
                    self._writer.add_scalar(f"mlflash/{name}", float(value), one.step)
