"""Who started this process, with how many others, and whether MPI's world is that many."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from ..human_readable.wording import many
from .findings import Finding, fine, warning, wrong

_RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@dataclasses.dataclass(frozen=True)
class Launch:
    """What the launcher says.

    Attributes:
        by: "srun", "mpiexec", "torchrun" (or what sets RANK and WORLD_SIZE as it does), or "" where there was none.
        rank: this process among all that were started.
        size: how many were started; None: it does not say.
    """

    by: str
    rank: int
    size: int | None

    @property
    def words(self) -> str:
        """Who started it."""
        return f"started by {self.by}" if self.by else "started alone"


def read(env: Mapping[str, str]) -> Launch:
    """Read what srun, mpiexec and torchrun tell in the environment. Not collective.

    mpiexec inside a Slurm job starts its own daemons by srun, whose variables the ranks inherit: it counts then. So
    does torchrun, wherever it is.
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
    """Cut what an MPI library says of itself down to name and version.

    Example:
        "MPICH Version:      5.0.2\\nMPICH Release date: ..." → "MPICH 5.0.2"; "Open MPI v5.0.11, package: ..." →
        "Open MPI v5.0.11"; "MPI VERSION    : CRAY MPICH version 8.1.27 (ANL base 3.4a2)" → "CRAY MPICH 8.1.27".
    """
    first = (library.strip("\0 \n").splitlines() or [""])[0]
    first = re.sub(r"^MPI VERSION *: *", "", first.split(",")[0])
    first = re.sub(r" *\(.*", "", re.sub(r"\b[Vv]ersion *:? *", "", first))
    return " ".join(first.split()) or "unknown"


def mpi_flag(library: str) -> str:
    """Say which flag of srun starts an MPI, as its wheels or common builds want it.

    Args:
        library: as :func:`tidy_version` gives it.
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
        launch: what was started.
        size: of COMM_WORLD; 1 where MPI was not even asked, as nothing says that there are others.
        library: as :func:`tidy_version` gives it.
        way: by which its ranks find each other without MPI; "": by none.
    """
    check, ranks = "world", many(size, "rank")
    if size == 1 < (launch.size or 1) and way:
        return fine(
            check, f"{many(launch.size or 1, 'rank')}, which meet by {way}; here only this one's node is looked at"
        )
    if launch.size is None or not launch.by:
        return fine(check, ranks + (", as this process was started alone" if not launch.by else ""))
    name = {"srun": "SLURM_STEP_NUM_TASKS", "torchrun": "WORLD_SIZE"}.get(launch.by, "mpiexec")
    if size == launch.size:
        return fine(check, f"{ranks}, as {name} says")
    if size > 1:
        return warning(check, f"{ranks}, but {name} says {launch.size}",
                       "start one process per rank, by one launcher only")  # fmt: skip
    if launch.by == "srun":
        return wrong(
            check, f"srun started {launch.size} tasks, and each is an MPI world of its own: only task 0 speaks here",
            f"start with srun {mpi_flag(library)}, as {library} wants it; srun --mpi=list shows what this Slurm has",
        )  # fmt: skip
    if launch.by == "torchrun":
        return wrong(
            check, f"WORLD_SIZE says {launch.size} ranks, and each is an MPI world of its own: only rank 0 speaks here",
            f"pip install 'mlflash[mpich]', which needs no launcher as {library} does; or start with mpiexec or srun",
        )  # fmt: skip
    return wrong(
        check, f"mpiexec started {launch.size} processes, and each is an MPI world of its own: only the first speaks",
        f"use the mpiexec of {library}, which mpi4py loads here; or let it load that mpiexec's library "
        "(MPI4PY_LIBMPI=/path/to/libmpi.so)",
    )  # fmt: skip
