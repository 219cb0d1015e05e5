"""Which node each rank is on, as a PMI server tells MPI: ``(vector,(node,nodes,ranks per node),...)``.

A block ``(2,3,4)`` means that the next four ranks are on node 2, then four on node 3 and four on node 4. If there are
more ranks than the blocks describe, the blocks are repeated. MPICH does this only if the first block begins at node 0,
so nodes are numbered here in the order in which they first appear. Example: the nodes 7 7 9 9 9 are
``(vector,(0,1,2),(1,1,3))``, and 7 9 7 9 are ``(vector,(0,2,1))``.

Source: MPICH, src/mpl/src/mpl_rankmap.c.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

_LONGEST = 128  # longest repeated sequence of blocks that is tried; more do not fit into a value of PMI


class Block(NamedTuple):
    """Consecutive nodes with the same number of ranks each."""

    node: int
    nodes: int
    ranks: int


def numbered(nodes: Sequence[int]) -> list[int]:
    """Number nodes from 0 in the order in which they first appear.

    Args:
        nodes: of each rank, any numbers `(ranks)`.
    """
    numbers: dict[int, int] = {}
    return [numbers.setdefault(node, len(numbers)) for node in nodes]


def blocks(nodes: Sequence[int]) -> tuple[Block, ...]:
    """Describe which node each rank is on, by as few blocks as a single pass finds.

    Args:
        nodes: of each rank, any numbers `(ranks)`.
    """
    renumbered = numbered(nodes)
    found: list[Block] = []
    for node, ranks in groupby(renumbered):
        count = len(list(ranks))
        last = found[-1] if found else None
        if last and last.ranks == count and last.node + last.nodes == node:
            found[-1] = Block(last.node, last.nodes + 1, count)
        else:
            found.append(Block(node, 1, count))
    for length, block in enumerate(found[1:_LONGEST], 1):
        if block.node == 0 and nodes_of(found[:length], len(nodes)) == renumbered:
            return tuple(found[:length])
    return tuple(found)


def nodes_of(described: Sequence[Block], size: int) -> list[int]:
    """The node of each rank, as MPI reads these blocks."""
    once = [block.node + i for block in described for i in range(block.nodes) for _ in range(block.ranks)]
    return (once * (size // max(1, len(once)) + 1))[:size]


def mapping(nodes: Sequence[int]) -> str:
    """The node of each rank, as the value of PMI_process_mapping."""
    return f"(vector,{','.join('({},{},{})'.format(*block) for block in blocks(nodes))})"
