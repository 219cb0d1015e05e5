"""NVRx's replication strategies ↔ redundancy schemes."""

from __future__ import annotations

from typing import Any

from mlflash.errors import ConfigError


class Clique:
    """Stands for NVRx's clique replication where Megatron makes one of its flags; makes no process groups.

    Attributes:
        replication_factor: nodes that have each rank's checkpoint.
    """

    def __init__(self, replication_jump: int | None = None, replication_factor: int = 2):
        self.replication_factor = replication_factor

    @classmethod
    def from_replication_params(cls, replication_jump: int | None = None, replication_factor: int = 2) -> Clique:
        """Make it as NVRx does, of ``--replication-jump`` and ``--replication-factor``."""
        return cls(replication_jump, replication_factor)


def scheme_of(strategy: Any) -> str:
    """The redundancy scheme that a replication strategy asks for.

    With NVRx each of the F ranks of a clique holds what all of them have: that survives the loss of F - 1 of them, as
    F - 1 copies on other nodes do, at any place. The jump says which ranks are far enough apart; mlflash
    knows the nodes, and goes by ``domains``.

    Args:
        strategy: a scheme by name; None: "none"; or NVRx's ``CliqueReplicationStrategy``, or its lazy one.

    Raises:
        ConfigError: it is none of these.
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
