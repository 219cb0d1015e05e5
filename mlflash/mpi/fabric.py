"""What lies between the nodes of a job, and which transport is taken for it where nobody says one."""

from __future__ import annotations

import os
from collections.abc import Sequence

from .world import World

RDMA_DEVICES = ("/sys/class/infiniband", "/sys/class/cxi")
"""Folders in which Linux lists the RDMA devices of a node: InfiniBand and RoCE, Slingshot."""

# What "auto" is, by what lies between the nodes; from the tables of benchmarks/transport. There Isend and Irecv were by
# far the fastest on one host, and on a network within an eighth of the best Put, or faster while the main thread
# computed. RDMA was not measured: a Put needs nothing of its target's CPU there, and two-sided needs both couriers.
# Over UCX's cma, the one fabric of software of which that is true, both were equally fast.
AUTO = {"one host": "p2p", "network": "p2p", "RDMA": "rma"}


def has_rdma(folders: Sequence[str] | None = None) -> bool:
    """Whether this node has an RDMA device (InfiniBand, RoCE, Slingshot). Not collective.

    Args:
        folders: where devices are listed. Default: `RDMA_DEVICES`.
    """
    looked_in = RDMA_DEVICES if folders is None else folders
    return any(os.path.isdir(folder) and os.listdir(folder) for folder in looked_in)


def between_nodes(world: World) -> str:
    """Tell what lies between the nodes: a key of `AUTO`. Collective over the world."""
    if world.emulated or len(world.topology.node_names) == 1:
        return "one host"
    return "RDMA" if world.agree([int(has_rdma())])[0] else "network"


def choose_transport(world: World, asked: str) -> str:
    """Take the transport asked for, or the one for what lies between the nodes. Collective over the world."""
    return asked if asked != "auto" else AUTO[between_nodes(world)]
