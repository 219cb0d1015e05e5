"""How much of a node's memory a job takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..human_readable.units import show_bytes
from ..human_readable.wording import many
from ..memory.memory_limits import headroom


@dataclasses.dataclass(frozen=True)
class Need:
    """What a job takes on the node with the most of it.

    Attributes:
        nbytes: bytes that the job takes.
        words: how they add up.
    """

    nbytes: int
    words: str

    @property
    def spare_nbytes(self) -> int:
        """Bytes that must stay free when the memory is allocated."""
        return headroom(self.nbytes)

    @property
    def free_nbytes(self) -> int:
        """Bytes that must be free in total."""
        return self.nbytes + self.spare_nbytes


def count(nbytes: int, scheme: str, own_slots: int, copy_slots: int, nodes: int, ranks_per_node: int) -> Need:
    """Count what a job takes, as `mlflash plan` does.

    Args:
        nbytes: bytes of state on each rank.
        scheme: redundancy scheme.
        own_slots: number of own slots of each rank.
        copy_slots: number of slots of each copy or parity file.
        nodes, ranks_per_node: size of the job.

    Example:
        100 bytes in 2 slots, "copy", 2 nodes of 1 rank → a little more than 400 bytes.

    Raises:
        ConfigError: there is no such job.
    """
    from ..planning.scheme_comparison import Job, consider, node_nbytes

    job = Job(tuple(f"node{number}" for number in range(nodes)), ranks_per_node, nbytes,
              own_slots=own_slots, copy_slots=copy_slots)  # fmt: skip
    ((_, placement),), _ = consider(job, [scheme])
    of_ranks = f"{many(ranks_per_node, 'rank')} of {show_bytes(nbytes)}"
    made = f"{scheme} over {nodes} nodes" if nodes > 1 else f"{scheme} protects nothing on one node"
    return Need(node_nbytes(job, placement), f"{of_ranks}, {own_slots} slots each, {made}")


def shape(env: Mapping[str, str]) -> tuple[int, int]:
    """Guess how many nodes and ranks per node a Slurm job has. Return one each if unknown. Not collective."""
    nodes = env.get("SLURM_JOB_NUM_NODES", "")
    ranks = env.get("SLURM_NTASKS_PER_NODE", "")
    tasks = env.get("SLURM_NTASKS", "")
    number = int(nodes) if nodes.isdigit() else 1
    if ranks.isdigit():
        return number, int(ranks)
    return number, -(-int(tasks) // number) if tasks.isdigit() else 1
