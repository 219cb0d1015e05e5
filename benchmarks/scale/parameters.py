"""The input of the model: machines, fabrics, file systems and failures, each number with its source.

"Measured" numbers come from a run of `run.py` (see README.md). "Published" ones name their source. All others are
marked as an "assumption".
"""

from __future__ import annotations

import dataclasses

GB, TB, DAY_S = 1e9, 1e12, 86_400.0


@dataclasses.dataclass(frozen=True)
class Node:
    """A node and the rates of its ranks, in bytes per second if no other unit is named.

    Attributes:
        gpus: GPUs of the node, with one rank each.
        nics: ports of the fabric that these ranks share.
        copy_Bps: rate of each GPU to host memory and back, while all GPUs of the node copy.
        check_Bps: rate of checksums on one core.
        xor_Bps, rs_Bps: rate of data coded on one core, with one and with two parities.
        poll_s: longest sleep of the courier between two looks at a collective, in seconds.
        start_s, restore_s: time that a rank computes at its start and in a restore, for each rank of the job.
        inventory_nbytes: size of a node's inventory.
    """

    gpus: int = 8
    nics: int = 4  # published: Frontier, 4 ports of 200 Gb/s for 8 GCDs (OLCF, Frontier User Guide)
    # Published: 26 GB/s for one A100 over PCIe 4 (github.com/jdh4/della-gpu-A100). Assumption: half of it if all eight
    # GPUs of a node copy at once, because 8 x 26 GB/s is all that the host's memory can do.
    copy_Bps: float = 13 * GB
    check_Bps: float = 14.0 * GB  # measured: XXH3-64 over blocks of 1 MiB
    xor_Bps: float = 19.0 * GB  # measured: 7 + 1, ISA-L
    rs_Bps: float = 15.0 * GB  # measured: 6 + 2, ISA-L
    poll_s: float = 1e-3  # mlflash.mpi.world.World.pause
    start_s: float = 10e-6  # measured: relaunched Checkpointers of 131,072 ranks
    restore_s: float = 10e-6  # measured: the same
    inventory_nbytes: float = 323.0  # counted: rs:6+2, 8 ranks


@dataclasses.dataclass(frozen=True)
class Fabric:
    """The network between nodes, as alpha and beta.

    Attributes:
        name: name of the fabric.
        alpha_s: latency of a small message.
        beta_Bps: bytes per second of one port between two otherwise idle nodes.
        loaded: share of this rate that remains when all nodes send to distant nodes at once.
    """

    name: str
    alpha_s: float
    beta_Bps: float
    # Assumption. Aurora's global links carry 1.38 PB/s, its 85,000 ports of 25 GB/s inject 2.1 (arXiv:2512.04291): 0.65
    # at best.
    loaded: float = 0.5


# Published: CSCS, regression tests of Alps: osu_latency of 256 bytes 2.3 us, osu_bw of 4 MiB 24,000 MB/s, one port
# (github.com/eth-cscs/cscs-reframe-tests, checks/microbenchmarks/mpi/osu/osu_run.py).
SLINGSHOT_11 = Fabric("Slingshot-11, 200 Gb/s", 2.3e-6, 24.0 * GB)
# Published: all-reduce of 16 GiB over 4 nodes of 8 B200: 376.7 GB/s of bus bandwidth, 47 for each of 8 ports
# (github.com/stas00/ml-engineering, network/benchmarks). Assumption: its latency is that of the other one.
PORTS_400G = Fabric("InfiniBand or RoCE, 400 Gb/s", 2.3e-6, 47.0 * GB)


@dataclasses.dataclass(frozen=True)
class FileSystem:
    """A parallel file system that one job has to itself.

    Attributes:
        name: name of the file system.
        write_Bps, read_Bps: rates of all clients together.
        client_Bps: rate of one node.
        creates_per_s: files created or opened in a second by all clients.
    """

    name: str
    write_Bps: float
    read_Bps: float
    client_Bps: float
    # Published: mdtest on Lustre with one metadata server, 29,000 creates/s at 240 threads (Dell HPC Lustre Storage
    # with Mellanox EDR, white paper, figure 12). Assumption: it is the same elsewhere.
    creates_per_s: float = 29_000.0


# Published: IOR on all of it, 1,024 nodes x 4 processes, 64 MiB transfers: 4,435,971 MiB/s, which is 4.54 GB/s a node
# (G. K. Lockwood, glennklockwood.com/garden/IOR). Assumption: it reads as fast as it writes, and a node alone is not
# faster.
PERLMUTTER = FileSystem("all-flash Lustre, 4.65 TB/s", 4.65 * TB, 4.65 * TB, 4.54 * GB)
# Published: Tectonic under Llama 3, 2 TB/s sustained, 7 TB/s at its peak (arXiv:2407.21783, 3.3.1). Assumption: a node
# alone is as fast as one of Perlmutter's.
TECTONIC = FileSystem("2 TB/s, as under Llama 3", 2.0 * TB, 2.0 * TB, 4.54 * GB)


@dataclasses.dataclass(frozen=True)
class WireUp:
    """How couriers find each other, through one store. The addresses of all nodes go from node to node.

    Attributes:
        name: name of the library that creates the addresses.
        address_nbytes: size of a node's address.
        serve_Bps: bytes of addresses that the store or a node sends in a second, on one core.
        rank_s: further time of the store for each rank of the job.
        put_s: further time of the store for each node, if its address has more than one segment.
        node_s: time of each node for each node of the job.
        fixed_s: time of couriers and a Checkpointer of a few ranks.
    """

    name: str
    address_nbytes: float
    serve_Bps: float = 1.1 * GB  # measured: wireup.py, 64 to 512 nodes, least squares
    rank_s: float = 0.28e-3  # measured: the same
    put_s: float = 0.0
    node_s: float = 66e-6  # measured: wireup.py, 512 nodes
    fixed_s: float = 0.5  # measured: a recovery in place of four ranks on two cores (docs/keep_alive.md): 0.25 + 0.25


LIBFABRIC = WireUp("libfabric", 1e3)  # counted: the address of a node in MPICH 5.0.2, one segment
# Counted: nine segments. Measured: wireup.py, 512 nodes with one rank each, addresses from node to node.
UCX = WireUp("UCX", 9e3, put_s=0.75e-3, node_s=309e-6)

# Published: "1 MB to 4 GB per GPU" (arXiv:2407.21783, 3.3.1): the upper end.
STATE_NBYTES = 4.0 * GB
# Published: 419 unexpected interruptions in 54 days on 16,384 GPUs, 8 a node (arXiv:2407.21783, 3.3.4).
NODE_MTBF_S = 54 * DAY_S * 16_384 / 8 / 419
# Published: 1.8 h on 16,384 GPUs (projected from smaller jobs; Kokolis et al., arXiv:2410.21680).
NODE_MTBF_RSC_S = 1.8 * 3600 * 16_384 / 8
RELAUNCH_S = 120.0  # assumption: from a failure until new ranks run, the same for all compared ways
# Measured on one H100 that three ranks shared: 0.5 to 1.1 s until all have left their step, with NCCL aborted
# (docs/keep_alive.md).
LEAVE_S = 1.1
LOST_AFTER_S = 10.0  # default of --lost-after: a node that is silent for longer counts as lost
DRAIN_EVERY_S = 3600.0  # assumption: how often a checkpoint also goes to the file system
