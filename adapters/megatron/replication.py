"""Convert NVRx's replication strategies to redundancy schemes."""

from __future__ import annotations

from typing import Any

from mlflash.errors import ConfigError


class Clique:
    """Replaces NVRx's clique replication when Megatron makes one from its flags. It makes no process groups.

    Attributes:
        replication_factor: number of nodes that have each rank's checkpoint.
    """

    def __init__(self, replication_jump: int | None = None, replication_factor: int = 2):
        self.replication_factor = replication_factor

    @classmethod
    def from_replication_params(cls, replication_jump: int | None = None, replication_factor: int = 2) -> Clique:
        """Make a strategy as NVRx does, from ``--replication-jump`` and ``--replication-factor``."""
        return cls(replication_jump, replication_factor)


def scheme_of(strategy: Any) -> str:
    """Give the redundancy scheme that a replication strategy asks for.

    With NVRx, each of the F ranks of a clique holds what all of them have. This survives the loss of F - 1 of them.
    F - 1 copies survive the same, on whatever other nodes they are. NVRx's jump says which ranks are far enough apart.
    mlflash ignores it, because it knows the nodes and uses ``domains``.

    Args:
        strategy: the name of a scheme; None, which means "none"; or NVRx's ``CliqueReplicationStrategy`` or its lazy
            variant.

    Raises:
        ConfigError: the strategy is none of these.
    """
    if strategy is None:
        return "none"
    if isinstance(strategy, str):
        return strategy
    factor = getattr(strategy, "replication_factor", None)
    if factor is None:
        group = getattr(strategy, "local_group", None)
        ranks = getattr(group, "ranks", None)
        factor = None if ranks is None else len(ranks)
    if factor is None:
        raise ConfigError("mlflash does not know this replication strategy", found=type(strategy).__name__,
                          expected='a scheme such as "copy", or a clique replication strategy of NVRx')  # fmt: skip
    return "none" if factor < 2 else f"copy:{factor - 1}"
