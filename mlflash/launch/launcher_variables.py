"""Finds the rank of a process and the number of ranks, from the variables of its launcher.

If launchers are nested, the inner one counts: torchrun in a task of srun numbers its own workers, and mpiexec in a
batch script of Slurm numbers its own ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ..errors import WorldMismatch

AGENT = "MLFLASH_AGENT"
"""How the agent of a node reaches `mlflash run`. It is removed before ranks are started."""
KEPT = "MLFLASH_KEPT"
"""Set if this process goes on when others are lost: how to reach the agent, and who this process is."""
PRESUMED = "MLFLASH_PRESUMED"
"""The rank that a waiting process expects to get."""
SEED = "mlflash-seed"
"""The name of a process that only waits for its child, which trains: `run.forked_spare`."""
_GPUS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_PREFIXES = ("PMI", "HYD", "OMPI", "PRTE", "SLURM_PMI", "MPI_LOCAL")  # PMI is PMIX, too, and HYD is HYDI
# Other variables that concern one rank or one step.
_OF_A_STEP = ("SLURM_STEP", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_TASK_PID", "TORCHELASTIC_")
_OF_A_RANK = frozenset({"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "CROSS_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
                        "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"})  # fmt: skip

# By launcher: the variable with the number of ranks on this host or of hosts, and its value for a single host.
_ON_ONE_HOST = {
    "hydra": ("MPI_LOCALNRANKS", ""),
    "prterun": ("OMPI_COMM_WORLD_LOCAL_SIZE", ""),
    "torchrun": ("LOCAL_WORLD_SIZE", ""),
    "srun": ("SLURM_STEP_NUM_NODES", "1"),
}
_NAMES_OF_LAUNCH = {
    "prterun": ("PMIX_NAMESPACE",),
    "srun": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
}


@dataclasses.dataclass(frozen=True)
class Launched:
    """A rank as its launcher describes it."""

    rank: int
    size: int
    local_rank: int | None  # its number on its node; None if the launcher does not tell
    launcher: str  # hydra, prterun, srun, torchrun, or none; torch.distributed if the program has set it up


def launched(environment: Mapping[str, str]) -> Launched:
    """Find out which rank this process is.

    Example: under ``mpiexec -n 4`` of MPICH the second process has PMI_RANK=1 and PMI_SIZE=4, and is
    ``Launched(1, 4, 1, "hydra")``; a process that nobody launched is ``Launched(0, 1, 0, "none")``.

    Raises:
        WorldMismatch: two launchers contradict each other, or one makes no sense.
    """
    torch = _read(environment, "torchrun", "RANK", ["WORLD_SIZE"], "LOCAL_RANK")
    # Only torchrun sets both. A user who sets RANK for all ranks alike does not.
    if torch is not None and ("TORCHELASTIC_RUN_ID" in environment or "CROSS_RANK" in environment):
        return torch
    hydra = _read(environment, "hydra", "PMI_RANK", ["PMI_SIZE"], "MPI_LOCALRANKID")
    prterun = _read(
        environment, "prterun", "OMPI_COMM_WORLD_RANK", ["OMPI_COMM_WORLD_SIZE"], "OMPI_COMM_WORLD_LOCAL_RANK"
    )
    srun = None
    # A batch script has a SLURM_PROCID, too, but is no task of a step.
    if "SLURM_STEP_NUM_TASKS" in environment or "SLURM_STEP_ID" in environment:
        srun = _read(environment, "srun", "SLURM_PROCID", ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"], "SLURM_LOCALID")
    if prterun is not None or "HYDI_CONTROL_FD" in environment:
        srun = None  # it only started the daemons of that launcher, one per node
    descriptions = [each for each in (srun, prterun, hydra, torch) if each is not None]
    for other in descriptions[1:]:
        _compare(descriptions[0], other)
    if not descriptions and "PMI_PORT" in environment and "PMI_ID" in environment:
        raise WorldMismatch(
            "hydra did not tell this process its rank and the number of ranks: start mpiexec without -pmi-port",
            expected="PMI_RANK and PMI_SIZE",
            found=f"PMI_PORT={environment['PMI_PORT'][:80]}",
        )
    return descriptions[0] if descriptions else Launched(0, 1, 0, "none")


def is_on_one_host(environment: Mapping[str, str], me: Launched) -> bool:
    """Whether the launcher says that all ranks are on this host; False if it does not tell."""
    if me.size == 1:
        return True
    name, expected = _ON_ONE_HOST.get(me.launcher, ("", ""))
    return environment.get(name, "") == (expected or str(me.size))


def name_of_launch(environment: Mapping[str, str], me: Launched) -> str | None:
    """A name that all ranks of this launch have, and no other launch on this host; None if the launcher gives none.

    Example: the first step of Slurm's job 7 is ``srun 7 0 ``, and ``srun 7 0 1`` after a requeue.
    """
    needed, *more = _NAMES_OF_LAUNCH.get(me.launcher, ("",))
    if needed not in environment:
        return None
    return " ".join([me.launcher, *(environment.get(name, "") for name in (needed, *more))])


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process that no launcher knows and that sees no GPU.

    Settings of MPI (``MPIR_CVAR_*``, ``UCX_*``, ``FI_*``) stay.
    """
    kept = {name: value for name, value in environment.items() if not name.startswith(_PREFIXES)}
    return {**kept, **dict.fromkeys(_GPUS, ""), "OPENBLAS_NUM_THREADS": "1"}


def without_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables of a rank, for ranks that are started anew.

    Slurm's variables of the whole job stay.
    """
    return {
        name: value for name, value in environment.items()
        if not name.startswith(_PREFIXES + _OF_A_STEP) and name not in _OF_A_RANK
    }  # fmt: skip


def as_torchrun(
    environment: Mapping[str, str], rank: int, size: int, local_rank: int, address: str, port: int
) -> dict[str, str]:
    """The environment of a rank that meets the others like under torchrun, however it was started.

    For a program whose MPI already uses the launcher's way. The port must be free on the host of rank 0.
    """
    meets = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "MASTER_ADDR": address, "MASTER_PORT": port}
    return without_launcher(environment) | {name: str(value) for name, value in meets.items()}


def _read(
    environment: Mapping[str, str], launcher: str, rank_name: str, size_names: Sequence[str], local_name: str
) -> Launched | None:
    size_name = next((name for name in size_names if name in environment), None)
    if rank_name not in environment or size_name is None:
        return None
    rank, size = _number(environment, rank_name), _number(environment, size_name)
    if rank >= size:
        raise WorldMismatch(
            f"{launcher} gives this process a rank that its world does not have: it has another process's environment",
            expected=f"{rank_name} below {size_name}={size}",
            found=f"{rank_name}={rank}",
        )
    local = _number(environment, local_name) if local_name in environment else None
    return Launched(rank, size, local, launcher)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name].strip()
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise WorldMismatch(f"{name} is neither a rank nor a number of ranks", found=f"{name}={text[:80]!r}")
    return int(text)


def _compare(first: Launched, other: Launched) -> None:
    if (first.rank, first.size) != (other.rank, other.size):
        raise WorldMismatch(
            f"the variables of {first.launcher} and of {other.launcher} contradict each other about this process: "
            "unset those that do not belong to it",
            expected=f"rank {first.rank} of {first.size} ({first.launcher})",
            found=f"rank {other.rank} of {other.size} ({other.launcher})",
        )
