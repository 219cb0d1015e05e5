"""How long a commit and a restore take on a machine with a given number of GPUs, and what share of time a job loses.

README.md lists the formulas, the sources and what is left out. `mlflash.planning`, which is behind `mlflash plan`,
computes the lost time. It gets the times of this model instead of measured ones.
"""

from __future__ import annotations

import dataclasses
import math

from scale.parameters import (
    DRAIN_EVERY_S,
    LIBFABRIC,
    NODE_MTBF_S,
    RELAUNCH_S,
    STATE_NBYTES,
    Fabric,
    FileSystem,
    Node,
    WireUp,
)

from mlflash.placement.protection_groups import place
from mlflash.placement.redundancy_scheme import Scheme, parse
from mlflash.placement.survival import of
from mlflash.planning.interval import Costs, best_interval, waste
from mlflash.planning.scheme_comparison import Job, share_uncovered
from mlflash.wireup.address_relay import FAN_OUT, LEAST_NODES

COMMIT_ALLREDUCES = 2  # counted by run.py; three if ranks share state
# Counted by run.py: 32 in a relaunched start, 40 in a restore with a lost slot (copies, p2p). They include healing and
# the collectives of one node, so they are more than precede the load.
RESTORE_COLLECTIVES = 72


@dataclasses.dataclass(frozen=True)
class Machine:
    """The machine of a job.

    Attributes:
        gpus: GPUs of the job, with one rank each.
        nbytes: bytes of state on each GPU.
        wire_up: how couriers find each other.
    """

    gpus: int
    node: Node
    fabric: Fabric
    nbytes: float = STATE_NBYTES
    wire_up: WireUp = LIBFABRIC

    @property
    def nodes(self) -> int:
        """Number of nodes. The last one may be partly used."""
        return -(-self.gpus // self.node.gpus)

    @property
    def wire_Bps(self) -> float:
        """Bytes per second that a rank can send while all ranks send: its share of the ports of its node."""
        return self.fabric.beta_Bps * self.fabric.loaded * self.node.nics / self.node.gpus

    @property
    def stall_s(self) -> float:
        """Time of the call of ``save``, which copies from the GPU to host memory without overlap."""
        return self.nbytes / self.node.copy_Bps


def sent_per_byte(scheme: Scheme) -> float:
    """Bytes that a rank sends to protect one byte of its state.

    Example:
        copy → 1, copy:2 → 2, xor:8 → 1 (to the rank that codes the stripe), rs:6+2 → 7/6 (with the second parity).
    """
    if scheme.kind == "none":
        return 0.0
    if not scheme.parity:
        return float(scheme.losses)
    return 1 + (scheme.losses - 1) / (scheme.members - scheme.losses)


def collective_s(machine: Machine, ranks: int, nbytes: float = 0.0) -> float:
    """Compute the time of a collective: alpha log2 P, its bytes, and the delay until the courier sees the end."""
    steps = math.ceil(math.log2(ranks))
    return machine.fabric.alpha_s * steps + nbytes / machine.wire_Bps + machine.node.poll_s


def committed_s(machine: Machine, scheme: Scheme) -> float:
    """Compute the time from the call of ``save`` to the commit on all ranks, without overlap."""
    node, nbytes, sent = machine.node, machine.nbytes, sent_per_byte(scheme)
    wire = sent * nbytes / machine.wire_Bps
    checks = (1 + sent) * nbytes / node.check_Bps  # what is sent, and what arrives
    coding = nbytes / (node.xor_Bps if scheme.losses == 1 else node.rs_Bps) if scheme.parity else 0.0
    return machine.stall_s + wire + checks + coding + COMMIT_ALLREDUCES * collective_s(machine, machine.gpus)


def wire_up_s(machine: Machine) -> float:
    """Compute the time until all couriers have found each other.

    All wait for the store. The addresses go from node to node. The model assumes that a node passes them on only after
    its own work with them. A real node need not wait for that.
    """
    how, nodes = machine.wire_up, machine.nodes
    given_out = nodes * how.address_nbytes / how.serve_Bps  # to one node
    if nodes < LEAST_NODES:
        levels, askers = 1, nodes
    else:
        levels = levels_below(nodes)
        askers = 1 + FAN_OUT * levels
    store_s = how.rank_s * machine.gpus + how.put_s * nodes
    return how.fixed_s + store_s + askers * given_out + levels * how.node_s * nodes


def levels_below(nodes: int) -> int:
    """Give the number of levels below the root of a tree of nodes. Each node gets all addresses from the one above."""
    levels, last = 0, 0
    while last < nodes - 1:
        levels, last = levels + 1, FAN_OUT * (last + 1)
    return levels


def agreed_s(machine: Machine) -> float:
    """Compute the time of a restore without its bytes: computing on each rank, inventories of all nodes, agreement."""
    node, ranks = machine.node, machine.gpus
    code = (node.start_s + node.restore_s) * ranks
    tables = 2 * collective_s(machine, machine.nodes, machine.nodes * node.inventory_nbytes)
    return code + tables + RESTORE_COLLECTIVES * collective_s(machine, ranks)


def moved_s(machine: Machine, scheme: Scheme, node_lost: bool = True) -> float:
    """Compute the time to verify every byte, to fetch and verify what a spare node lacks, and to copy to the GPU."""
    node, nbytes = machine.node, machine.nbytes
    verify = nbytes / node.check_Bps
    fetch = 0.0
    if node_lost:
        fetch = nbytes / machine.wire_Bps + nbytes / node.check_Bps
        if scheme.parity:  # survivors gather the blocks of a stripe and decode in turn, then send the result
            data, survivors = scheme.members - scheme.losses, scheme.members - 1
            share = data / survivors * nbytes
            fetch += share / machine.wire_Bps + share / (node.xor_Bps if scheme.losses == 1 else node.rs_Bps)
    return verify + fetch + nbytes / node.copy_Bps


def restored_s(machine: Machine, scheme: Scheme, node_lost: bool = True) -> float:
    """Compute the time from the start of new ranks to a verified state on the GPU."""
    return wire_up_s(machine) + agreed_s(machine) + moved_s(machine, scheme, node_lost)


def pfs_s(machine: Machine, pfs: FileSystem, aggregate_Bps: float) -> float:
    """Compute the time in which each rank writes or reads a file, limited by node or file system, plus metadata."""
    of_node = machine.node.gpus * machine.nbytes / pfs.client_Bps
    of_all = machine.gpus * machine.nbytes / aggregate_Bps
    return max(of_node, of_all) + machine.gpus / pfs.creates_per_s


def pfs_committed_s(machine: Machine, pfs: FileSystem) -> float:
    """Compute the time from the call to a checkpoint in the file system, written from host memory."""
    return machine.stall_s + pfs_s(machine, pfs, pfs.write_Bps)


def pfs_restored_s(machine: Machine, pfs: FileSystem) -> float:
    """Compute the time from the start of new ranks to a state on the GPU, read from the file system."""
    return pfs_s(machine, pfs, pfs.read_Bps) + machine.nbytes / machine.node.copy_Bps


def memory_waste(machine: Machine, text: str, pfs: FileSystem, node_mtbf_s: float = NODE_MTBF_S) -> float:
    """Compute the share of time that a job loses with checkpoints in memory that are drained to a file system."""
    scheme = parse(text)
    costs = Costs(
        mtbf_s=node_mtbf_s / machine.nodes,
        stall_s=machine.stall_s,
        commit_s=committed_s(machine, scheme),
        restart_s=RELAUNCH_S + restored_s(machine, scheme),
        drain_every_s=DRAIN_EVERY_S,
        pfs_restart_s=RELAUNCH_S + pfs_restored_s(machine, pfs),
    )
    job = Job(tuple(f"n{number}" for number in range(machine.nodes)), machine.node.gpus, int(machine.nbytes))
    found = of(job.topology, place(job.topology, scheme))
    uncovered = share_uncovered(found, node_mtbf_s, costs.restart_s)
    lost: float = waste(best_interval(costs, uncovered), costs, uncovered)
    return lost


def pfs_waste(machine: Machine, pfs: FileSystem, waits: bool, node_mtbf_s: float = NODE_MTBF_S) -> float:
    """Compute the share of time that a job loses with checkpoints in the file system only.

    Args:
        waits: whether training waits until a checkpoint is written. Else it waits for the copy to host memory.
    """
    commit = pfs_committed_s(machine, pfs)
    costs = Costs(
        mtbf_s=node_mtbf_s / machine.nodes,
        stall_s=commit if waits else machine.stall_s,
        commit_s=commit,
        restart_s=RELAUNCH_S + pfs_restored_s(machine, pfs),
    )
    lost: float = waste(best_interval(costs, 0.0), costs, 0.0)
    return lost
