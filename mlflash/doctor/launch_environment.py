"""Who started this process, how many were started, and whether MPI's world has the same size."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from ..errors import pip_install
from ..human_readable.wording import many
from .findings import Finding, fine, warning, wrong

_RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@dataclasses.dataclass(frozen=True)
class Launch:
    """How the launcher started this process.

    Attributes:
        by: "srun", "mpiexec", "torchrun" (or another launcher that sets RANK and WORLD_SIZE), or "" without a launcher.
        rank: number of this process among all that were started.
        size: how many were started. None: the launcher does not say it.
    """

    by: str
    rank: int
    size: int | None

    @property
    def words(self) -> str:
        """Who started this process."""
        return f"started by {self.by}" if self.by else "started alone"


def read(env: Mapping[str, str]) -> Launch:
    """Read the variables of srun, mpiexec and torchrun from the environment. Not collective.

    mpiexec inside a Slurm job starts its daemons with srun, and the ranks inherit srun's variables. mpiexec is the
    launcher then. torchrun is the launcher wherever it runs.
    """
    if "TORCHELASTIC_RUN_ID" in env and _number(env, ("WORLD_SIZE",)) is not None:
        return Launch("torchrun", _number(env, ("RANK",)) or 0, _number(env, ("WORLD_SIZE",)))
    tasks = _number(env, ("SLURM_STEP_NUM_TASKS",))
    rank = _number(env, _RANKS)
    if "HYDI_CONTROL_FD" in env or "OMPI_COMM_WORLD_RANK" in env or (rank is not None and tasks is None):
        return Launch("mpiexec", rank or 0, _number(env, _SIZES))
    if tasks is not None:
        return Launch("srun", _number(env, ("SLURM_PROCID",)) or rank or 0, tasks)
    if (alike := _number(env, ("RANK",))) is not None and (size := _number(env, ("WORLD_SIZE",))) is not None:
        return Launch("torchrun", alike, size)
    return Launch("", 0, None)


def _number(env: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    return next((int(env[name]) for name in names if env.get(name, "").isdigit()), None)


def tidy_version(library: str) -> str:
    """Cut the version text of an MPI library down to name and version.

    Example:
        "MPICH Version:      5.0.2\\nMPICH Release date: ..." → "MPICH 5.0.2"; "Open MPI v5.0.11, package: ..." →
        "Open MPI v5.0.11"; "MPI VERSION    : CRAY MPICH version 8.1.27 (ANL base 3.4a2)" → "CRAY MPICH 8.1.27".
    """
    first = (library.strip("\0 \n").splitlines() or [""])[0]
    first = re.sub(r"^MPI VERSION *: *", "", first.split(",")[0])
    first = re.sub(r" *\(.*", "", re.sub(r"\b[Vv]ersion *:? *", "", first))
    return " ".join(first.split()) or "unknown"


def mpi_flag(library: str) -> str:
    """Return the flag of srun that starts an MPI, for its wheels or common builds.

    Args:
        library: as :func:`tidy_version` returns it.
    """
    name = library.lower()
    if "cray" in name:
        return "--mpi=cray_shasta"
    if "open mpi" in name:
        return "--mpi=pmix"
    if "intel" in name:
        return "--mpi=pmi2, with I_MPI_PMI_LIBRARY=/path/to/libpmi2.so"
    return "--mpi=pmi2"


def judge_size(launch: Launch, size: int, library: str, way: str = "") -> Finding:
    """Compare the size of MPI's world with the number of processes that were started.

    Args:
        launch: how this process was started.
        size: size of COMM_WORLD; 1 if MPI was not asked, because nothing says that there are other processes.
        library: as :func:`tidy_version` returns it.
        way: how its ranks find each other without MPI; "": not at all.
    """
    check, ranks = "world", many(size, "rank")
    if size == 1 < (launch.size or 1) and way:
        return fine(
            check, f"{many(launch.size or 1, 'rank')}, which meet by {way}; this command looks at this node only"
        )
    if launch.size is None or not launch.by:
        return fine(check, ranks + (", because this process was started alone" if not launch.by else ""))
    name = {"srun": "SLURM_STEP_NUM_TASKS", "torchrun": "WORLD_SIZE"}.get(launch.by, "mpiexec")
    if size == launch.size:
        return fine(check, f"{ranks}, as {name} says")
    if size > 1:
        return warning(check, f"{ranks}, but {name} says {launch.size}",
                       "start one process per rank, with one launcher only")  # fmt: skip
    if launch.by == "srun":
        return wrong(
            check, f"srun started {launch.size} tasks, but each is alone in its MPI world: only task 0 reports here",
            f"start with srun {mpi_flag(library)}, which {library} needs; srun --mpi=list shows what this Slurm has",
        )  # fmt: skip
    if launch.by == "torchrun":
        return wrong(
            check, f"WORLD_SIZE says {launch.size} ranks, but each is alone in its MPI world: only rank 0 reports here",
            f"{library} needs its launcher: start with mpiexec or srun, or {pip_install('mpich')}, which needs none",
        )  # fmt: skip
    return wrong(
        check, f"mpiexec started {launch.size} processes, but each is alone in its MPI world: only the first reports",
        f"use the mpiexec of {library}, which mpi4py loads here; or let mpi4py load the library of that mpiexec "
        "(MPI4PY_LIBMPI=/path/to/libmpi.so)",
    )  # fmt: skip
