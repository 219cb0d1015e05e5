"""What the cluster offers: partitions, their nodes, the account of this user, and the flag of srun for an MPI."""

from __future__ import annotations

import dataclasses
import getpass
import re
import sys
from collections.abc import Sequence
from typing import NamedTuple

from ..doctor.launch_environment import mpi_flag, tidy_version
from ..errors import LaunchFailed
from ..launcher.on_slurm import ask
from ..launcher.processes import ask_within

_ASK_S = 30.0  # deadline of a request
_NODES = "%P|%l|%s|%c|%G|%N"
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_VERSION = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"


class Kind(NamedTuple):
    """CPUs and GPUs of equal nodes, as Slurm counts them."""

    cpus: int
    gpus: int


@dataclasses.dataclass(frozen=True)
class Partition:
    """A partition.

    Attributes:
        name: its name.
        default: whether Slurm uses it for a job that names no partition.
        limit: the longest time of a job, as Slurm writes it; "" without a limit.
        most: the most nodes of a job. None: no limit.
        kinds: the number of its nodes of each kind.
    """

    name: str
    default: bool
    limit: str
    most: int | None
    kinds: dict[Kind, int]

    def usual(self, gpus: int = 0) -> Kind | None:
        """Return the kind of node to train on: the most frequent one with GPUs, or without if there are no GPUs.

        Args:
            gpus: the least number of GPUs of a node.
        """
        fitting = {kind: count for kind, count in self.kinds.items() if kind.gpus >= gpus}
        return max(fitting, key=lambda kind: (kind.gpus > 0, fitting[kind]), default=None)

    def nodes_like(self, kind: Kind, gpus: int) -> int:
        """Count the nodes that have at least the CPUs of this kind and this number of GPUs."""
        return sum(count for other, count in self.kinds.items() if other.cpus >= kind.cpus and other.gpus >= gpus)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """What Slurm and mpi4py answered.

    Attributes:
        partitions: partitions by name, in the order of sinfo. Empty if Slurm does not answer.
        account: the default account of this user; "" if unknown.
        library: the MPI that mpi4py loads here; "" if it cannot load one.
        mpi: the values of --mpi that this srun has. Empty if unknown.
        cpus: the CPUs of each kind of node that jobs may use, if the node keeps some for itself.
    """

    partitions: dict[str, Partition]
    account: str
    library: str
    mpi: frozenset[str]
    cpus: dict[Kind, int] = dataclasses.field(default_factory=dict)

    @property
    def wanted_mpi(self) -> str:
        """The value of --mpi that the MPI needs; "" without an MPI."""
        return mpi_flag(self.library).removeprefix("--mpi=").partition(",")[0] if self.library else ""


def look() -> Cluster:
    """Ask Slurm and mpi4py."""
    version = _said([sys.executable, "-c", _VERSION])
    library = tidy_version(version) if version.strip() else ""
    try:
        told = ask(["sinfo", "--noheader", "--Node", f"--format={_NODES}"])
    except LaunchFailed:  # there is no Slurm, or it does not answer
        return Cluster({}, "", library, frozenset())
    partitions, first = read_nodes(told)
    account = _said(["sacctmgr", "--noheader", "--parsable2", "show", "user", getpass.getuser(),
                     "format=DefaultAccount"])  # fmt: skip
    shown = _said(["scontrol", "--oneliner", "show", "node", ",".join(first.values())]) if first else ""
    cpus = dict(re.findall(r"^NodeName=(\S+) .*?\bCPUEfctv=(\d+)", shown, re.M))
    return Cluster(partitions, account.strip(), library, read_mpi(_said(["srun", "--mpi=list"])),
                   {kind: int(cpus[node]) for kind, node in first.items() if node in cpus})  # fmt: skip


def _said(command: Sequence[str]) -> str:
    """Return what a command prints to stdout and stderr; "" if it fails."""
    try:
        done = ask_within(command, _ASK_S)
    except LaunchFailed:
        return ""
    return "" if done.returncode else done.stdout + done.stderr


def read_nodes(text: str) -> tuple[dict[str, Partition], dict[Kind, str]]:
    """Read the output of sinfo, a line for each node in each partition. Also return a node of each kind."""
    found: dict[str, Partition] = {}
    first: dict[Kind, str] = {}
    for line in text.splitlines():
        words = [word.strip() for word in line.split("|")]
        if len(words) != 6 or not words[0]:
            continue
        name, limit, size, cpus, gres, node = words
        most = size.rpartition("-")[2]
        partition = found.setdefault(name.rstrip("*"), Partition(
            name.rstrip("*"), name.endswith("*"), limit if _TIME.fullmatch(limit) else "",
            int(most) if most.isdigit() else None, {},
        ))  # fmt: skip
        kind = Kind(int(re.sub(r"\D.*", "", cpus) or 0), read_gpus(gres))
        partition.kinds[kind] = partition.kinds.get(kind, 0) + 1
        first.setdefault(kind, node)
    return found, first


def read_gpus(gres: str) -> int:
    """Count GPUs in Slurm's generic resources: ``gpu:h100:8(S:0-1),shard:64`` are 8."""
    count = 0
    for words in (entry.split(":") for entry in re.sub(r"\([^)]*\)", "", gres).split(",")):
        if words[0] == "gpu":
            count += int(words[-1]) if words[-1].isdigit() else 1
    return count


def read_mpi(text: str) -> frozenset[str]:
    """Read the output of ``srun --mpi=list``. Older versions write "srun: " before each line, and one type per line."""
    lines = [line.removeprefix("srun:").strip() for line in text.splitlines()]
    listed = [line if "available" not in line else line.partition(":")[2] for line in lines
              if not line.rstrip(". ").endswith("are")]  # fmt: skip
    return frozenset(re.findall(r"[\w.]+", " ".join(listed)))


def seconds(text: str) -> int | None:
    """Read a time as sbatch does: ``90`` is minutes, ``1-12`` is a day and a half. None if this is not a time."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    days, first, second, third = (None if part is None else int(part) for part in match.groups())
    if days is not None or third is not None:
        hours, minutes, rest = first, second, third
    else:
        hours, minutes, rest = 0, first, second
    return (((days or 0) * 24 + (hours or 0)) * 60 + (minutes or 0)) * 60 + (rest or 0)
