"""The kind of network between the nodes of a job, and the transport that "auto" chooses for it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from .world import World

RDMA_DEVICES = ("/sys/class/infiniband", "/sys/class/cxi")
"""Folders in which Linux lists the RDMA devices of a node: InfiniBand and RoCE, Slingshot."""

# The transport that "auto" chooses, by the network; from the tables of benchmarks/transport. Isend and Irecv were by
# far the fastest on one host. On a network they were within an eighth of the best Put, or faster while the main thread
# computed. RDMA was not measured. There, a Put does not use the CPU of its target, and messages need both couriers.
# UCX's cma is the only software fabric with this property; over it both were equally fast.
AUTO = {"one host": "p2p", "network": "p2p", "RDMA": "rma"}


def has_rdma(folders: Sequence[str] | None = None) -> bool:
    """Whether this node has an RDMA device (InfiniBand, RoCE, Slingshot)."""
    looked_in = RDMA_DEVICES if folders is None else folders
    return any(os.path.isdir(folder) and os.listdir(folder) for folder in looked_in)


def between_nodes(world: World) -> str:
    """The kind of network between the nodes: a key of `AUTO`. Collective over the world."""
    if world.emulated or len(world.topology.node_names) == 1:
        return "one host"
    return "RDMA" if world.agree([int(has_rdma())])[0] else "network"


def choose_transport(world: World, asked: str) -> str:
    """The transport asked for, or for "auto" the one for this network. Collective over the world."""
    return asked if asked != "auto" else AUTO[between_nodes(world)]
