"""Which rank of how many a process is, from what its launcher left in its environment.

Where launchers stand in each other, the inner one is asked: torchrun in a task of srun numbers its own workers, and
mpiexec in a batch script of Slurm its own ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ..errors import WorldMismatch

_GPUS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_PREFIXES = ("PMI", "HYD", "OMPI", "PRTE", "SLURM_PMI", "MPI_LOCAL")  # PMI is PMIX, too, and HYD is HYDI


@dataclasses.dataclass(frozen=True)
class Launched:
    """A rank as its launcher names it.

    Attributes:
        rank: of this process.
        size: how many ranks there are.
        local_rank: its number on its node; None where the launcher does not say.
        launcher: hydra, prterun, srun, torchrun, or none.
    """

    rank: int
    size: int
    local_rank: int | None
    launcher: str


def launched(environment: Mapping[str, str]) -> Launched:
    """Say which rank this process is. Not collective.

    Example: under ``mpiexec -n 4`` of MPICH the second process has PMI_RANK=1 and PMI_SIZE=4, and is
    ``Launched(1, 4, 1, "hydra")``; a process that nobody launched is ``Launched(0, 1, 0, "none")``.

    Raises:
        WorldMismatch: two launchers contradict each other, or one makes no sense.
    """
    torch = _read(environment, "torchrun", "RANK", ["WORLD_SIZE"], "LOCAL_RANK")
    # Both set what only they set; whoever wrote RANK into the environment of all ranks alike did not.
    if torch is not None and ("TORCHELASTIC_RUN_ID" in environment or "CROSS_RANK" in environment):
        return torch
    hydra = _read(environment, "hydra", "PMI_RANK", ["PMI_SIZE"], "MPI_LOCALRANKID")
    prterun = _read(
        environment, "prterun", "OMPI_COMM_WORLD_RANK", ["OMPI_COMM_WORLD_SIZE"], "OMPI_COMM_WORLD_LOCAL_RANK"
    )
    srun = None
    # A batch script has a SLURM_PROCID, too, and is no task of a step.
    if "SLURM_STEP_NUM_TASKS" in environment or "SLURM_STEP_ID" in environment:
        srun = _read(environment, "srun", "SLURM_PROCID", ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"], "SLURM_LOCALID")
    if prterun is not None or "HYDI_CONTROL_FD" in environment:
        srun = None  # it started the daemons of that launcher, one a node
    found = [one for one in (srun, prterun, hydra, torch) if one is not None]
    for other in found[1:]:
        _compare(found[0], other)
    return found[0] if found else Launched(0, 1, 0, "none")


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Give the environment of a process that no launcher knows of and that sees no GPU. Not collective.

    How MPI is to work (``MPIR_CVAR_*``, ``UCX_*``, ``FI_*``) stays.
    """
    kept = {name: value for name, value in environment.items() if not name.startswith(_PREFIXES)}
    return {**kept, **dict.fromkeys(_GPUS, ""), "OPENBLAS_NUM_THREADS": "1"}


def _read(
    environment: Mapping[str, str], launcher: str, rank_name: str, size_names: Sequence[str], local_name: str
) -> Launched | None:
    size_name = next((name for name in size_names if name in environment), None)
    if rank_name not in environment or size_name is None:
        return None
    rank, size = _number(environment, rank_name), _number(environment, size_name)
    if rank >= size:
        raise WorldMismatch(
            f"{launcher} gives this process a rank that its world does not have: its environment is not its own",
            expected=f"{rank_name} below {size_name}={size}",
            found=f"{rank_name}={rank}",
        )
    local = _number(environment, local_name) if local_name in environment else None
    return Launched(rank, size, local, launcher)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name].strip()
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise WorldMismatch(f"{name} is set to what is no rank and no number of ranks", found=f"{name}={text[:80]!r}")
    return int(text)


def _compare(one: Launched, other: Launched) -> None:
    if (one.rank, one.size) != (other.rank, other.size):
        raise WorldMismatch(
            f"the variables of {one.launcher} and of {other.launcher} say different things of this process: unset "
            "those that do not belong to it",
            expected=f"rank {one.rank} of {one.size} ({one.launcher})",
            found=f"rank {other.rank} of {other.size} ({other.launcher})",
        )
