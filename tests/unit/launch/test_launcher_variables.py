"""Rank and size from what launchers set, one inside of the other, too."""

from __future__ import annotations

import pytest

from mlflash.errors import WorldMismatch
from mlflash.launch.launcher_variables import Launched, is_on_one_host, launched, name_of_launch, without_launcher

HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "9", "HYDI_CONTROL_FD": "7", "MPI_LOCALRANKID": "1"}
PRTERUN = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
           "PMIX_RANK": "2"}  # fmt: skip
SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1",
        "SLURM_STEP_ID": "0"}  # fmt: skip
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, Launched(0, 1, 0, "none")),
        ({"HOME": "/root", "RANK": "admiral"}, Launched(0, 1, 0, "none")),
        (HYDRA, Launched(1, 4, 1, "hydra")),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, Launched(0, 1, None, "hydra")),
        (PRTERUN, Launched(2, 3, 0, "prterun")),
        (SRUN, Launched(3, 4, 1, "srun")),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}, Launched(3, 4, None, "srun")),
        ({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "5"}, Launched(3, 4, 1, "srun")),
        ({**SRUN, "PMIX_RANK": "3"}, Launched(3, 4, 1, "srun")),
        (TORCHRUN, Launched(5, 6, 1, "torchrun")),
        ({"RANK": "5", "WORLD_SIZE": "6"}, Launched(5, 6, None, "torchrun")),
        # deepspeed's own launcher
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "CROSS_RANK": "0"}, Launched(1, 2, 1, "torchrun")),
        (BATCH, Launched(0, 1, 0, "none")),
        # one inside of the other: the inner one numbers the processes
        ({**SRUN, **TORCHRUN}, Launched(5, 6, 1, "torchrun")),
        ({**HYDRA, **TORCHRUN}, Launched(5, 6, 1, "torchrun")),
        ({**SRUN, "RANK": "0", "WORLD_SIZE": "8", "CROSS_RANK": "0"}, Launched(0, 8, None, "torchrun")),
        ({**BATCH, **HYDRA}, Launched(1, 4, 1, "hydra")),
        ({**SRUN, **HYDRA}, Launched(1, 4, 1, "hydra")),
        ({**SRUN, **PRTERUN}, Launched(2, 3, 0, "prterun")),
        # a script that tells torch what its launcher said
        ({**HYDRA, "RANK": "1", "WORLD_SIZE": "4"}, Launched(1, 4, 1, "hydra")),
        ({**SRUN, "RANK": "3", "WORLD_SIZE": "4"}, Launched(3, 4, 1, "srun")),
    ],
)
def test_a_rank_is_what_its_launcher_says(environment: dict[str, str], found: Launched) -> None:
    assert launched(environment) == found


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({**HYDRA, "RANK": "1", "WORLD_SIZE": "8"}, "of hydra and of torchrun contradict each other"),
        ({**PRTERUN, "RANK": "0", "WORLD_SIZE": "3"}, "of prterun and of torchrun contradict each other"),
        ({**SRUN, "RANK": "0", "WORLD_SIZE": "4"}, "rank 3 of 4 \\(srun\\)\n.*rank 0 of 4 \\(torchrun\\)"),
        ({**SRUN, "PMI_RANK": "1", "PMI_SIZE": "4"}, "of srun and of hydra contradict each other"),
        ({**PRTERUN, **HYDRA}, "of prterun and of hydra contradict each other"),
        ({"PMI_RANK": "4", "PMI_SIZE": "4"}, "PMI_RANK below PMI_SIZE=4"),
        ({"RANK": "0", "WORLD_SIZE": "many"}, "WORLD_SIZE='many'"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1'"),
        ({**TORCHRUN, "LOCAL_RANK": ""}, "LOCAL_RANK=''"),
        ({"PMI_PORT": "host:5", "PMI_ID": "1", "HYDI_CONTROL_FD": "7"}, "start mpiexec without -pmi-port"),
    ],
)
def test_what_contradicts_itself_is_refused(environment: dict[str, str], text: str) -> None:
    with pytest.raises(WorldMismatch, match=text):
        launched(environment)


def test_an_agent_knows_of_no_launcher_and_sees_no_gpu() -> None:
    tuning = {"MPIR_CVAR_CH4_NETMOD": "ofi", "UCX_TLS": "tcp", "FI_PROVIDER": "tcp", "SLURM_JOB_ID": "7",
              "PATH": "/bin"}  # fmt: skip
    gone = {"PMIX_SERVER_URI": "x", "HYDRA_TOPOLIB": "x", "PRTE_X": "1", "SLURM_PMI_FD": "4", "SLURM_PMIX_X": "1",
            "OMPI_MCA_osc": "^ucx", "CUDA_VISIBLE_DEVICES": "0,1", "OPENBLAS_NUM_THREADS": "64"}  # fmt: skip
    left = without_launcher({**HYDRA, **PRTERUN, **tuning, **gone})
    gpus = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
    assert left == {**tuning, **dict.fromkeys(gpus, ""), "OPENBLAS_NUM_THREADS": "1"}
    assert launched(left) == Launched(0, 1, 0, "none")


@pytest.mark.parametrize(
    ("environment", "is_one"),
    [
        ({}, True),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, True),
        (HYDRA, False),
        ({**HYDRA, "MPI_LOCALNRANKS": "4"}, True),
        ({**HYDRA, "MPI_LOCALNRANKS": "2"}, False),
        (PRTERUN, False),
        ({**PRTERUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, True),
        ({**SRUN, "SLURM_STEP_NUM_NODES": "1"}, True),
        ({**SRUN, "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_NUM_NODES": "1"}, False),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "6"}, True),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "3"}, False),
        ({**SRUN, **TORCHRUN, "SLURM_STEP_NUM_NODES": "1"}, False),  # torchrun did not say so
    ],
)
def test_whether_all_ranks_are_on_one_host_is_what_their_own_launcher_says(
    environment: dict[str, str], is_one: bool
) -> None:
    assert is_on_one_host(environment, launched(environment)) == is_one


def test_a_launch_has_a_name_of_its_own_where_its_launcher_gives_one() -> None:
    def name(environment: dict[str, str]) -> str | None:
        return name_of_launch(environment, launched(environment))

    assert name(HYDRA) is name(TORCHRUN) is name({}) is name(PRTERUN) is None
    assert name({**PRTERUN, "PMIX_NAMESPACE": "prterun-host-7@1"}) == "prterun prterun-host-7@1"
    assert name({**SRUN, "SLURM_JOB_ID": "7"}) == "srun 7 0 "
    assert name({**SRUN, "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}) == "srun 7 0 1"
