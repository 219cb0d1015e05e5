"""Runs a script of Megatron-LM, such as pretrain_gpt.py, with its local checkpoints in memory.

Usage: python -m mpi4py train.py DIRECTORY SCRIPT [ARGUMENTS]...

DIRECTORY is where local checkpoints go at the end of a job. The ranks get RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
MASTER_PORT and torch.distributed from MPI, without torchrun. Slurm's variables would not do: the first node of the job
need not be that of rank 0 once a spare has taken its place.
"""

import os
import runpy
import sys

from mlflash.adapters.distributed import init_process_group
from mlflash.adapters.megatron import install

if __name__ == "__main__":
    directory = sys.argv[1]
    init_process_group()
    # "copy": each rank's checkpoint on another node, too; "xor:8" and others take less memory (`mlflash plan`).
    install("copy", directory=directory)
    # As `python SCRIPT ARGUMENTS` would.
    sys.argv = sys.argv[2:]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
