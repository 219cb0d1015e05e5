"""What a job takes of a node's memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..human_readable.units import show_bytes
from ..human_readable.wording import many
from ..memory.memory_limits import headroom


@dataclasses.dataclass(frozen=True)
class Need:
    """What a job takes of the node that gives most.

    Attributes:
        nbytes: that.
        words: of what it is made.
    """

    nbytes: int
    words: str

    @property
    def spare_nbytes(self) -> int:
        """What must be free besides when that is allocated."""
        return headroom(self.nbytes)

    @property
    def free_nbytes(self) -> int:
        """What must be free in all."""
        return self.nbytes + self.spare_nbytes


def count(nbytes: int, scheme: str, own_slots: int, copy_slots: int, nodes: int, ranks_per_node: int) -> Need:
    """Count what a job takes, as `mlflash plan` does.

    Args:
        nbytes: of state, on each rank.
        scheme: redundancy.
        own_slots: of each rank.
        copy_slots: of each copy or parity file.
        nodes, ranks_per_node: of the job.

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
    made = f"{scheme} over {nodes} nodes" if nodes > 1 else f"{scheme} makes nothing on one node"
    return Need(node_nbytes(job, placement), f"{of_ranks}, {own_slots} slots each, {made}")


def shape(env: Mapping[str, str]) -> tuple[int, int]:
    """Guess how many nodes and ranks per node a Slurm job has; one each where nothing is said. Not collective."""
    nodes = env.get("SLURM_JOB_NUM_NODES", "")
    ranks = env.get("SLURM_NTASKS_PER_NODE", "")
    tasks = env.get("SLURM_NTASKS", "")
    number = int(nodes) if nodes.isdigit() else 1
    if ranks.isdigit():
        return number, int(ranks)
    return number, -(-int(tasks) // number) if tasks.isdigit() else 1
