"""Layouts of ranks, nodes and schemes that several tests go through."""

from __future__ import annotations

import itertools

from mlflash.placement.topology import Topology, from_node_ids

SCHEMES = ["copy", "copy:2", "copy:3", "xor:3", "xor:4", "xor:8", "rs:2+1", "rs:2+2", "rs:3+2", "rs:6+2", "rs:5+3"]


def layout(*sizes: int) -> Topology:
    """Nodes with so many ranks each, one after the other."""
    firsts = list(itertools.accumulate(sizes, initial=0))
    return from_node_ids([(firsts[n], f"n{n}") for n, size in enumerate(sizes) for _ in range(size)])
