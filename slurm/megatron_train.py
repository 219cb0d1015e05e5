"""Run a script of Megatron-LM, such as pretrain_gpt.py, with its local checkpoints in memory.

Usage: python train.py DIRECTORY SCRIPT [ARGUMENTS]...

At the end of a job, the newest local checkpoint is copied to DIRECTORY. The ranks get RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR, MASTER_PORT and torch.distributed from mlflash, without torchrun. Slurm's variables are not enough: after a
spare node has replaced the first node of the job, rank 0 runs on another node.
"""

import os
import runpy
import sys

from mlflash.adapters.distributed import init_process_group
from mlflash.adapters.megatron import install

if __name__ == "__main__":
    directory = sys.argv[1]
    init_process_group()
    # "copy" keeps each rank's checkpoint on another node, too. "xor:8" and others take less memory (`mlflash plan`).
    install("copy", directory=directory)
    # As `python SCRIPT ARGUMENTS` would.
    sys.argv = sys.argv[2:]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
