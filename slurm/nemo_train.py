"""Run a script of NeMo on the ranks that srun started. The script makes the two calls of docs/nemo.md.

Usage: python train.py SCRIPT [ARGUMENTS]...

The ranks get RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and torch.distributed from mlflash, without
torchrun. Slurm's variables are not enough: after a spare node has replaced the first node of the job, rank 0 runs on
another node.
"""

import os
import runpy
import sys

from mlflash.adapters.distributed import init_process_group

if __name__ == "__main__":
    init_process_group()
    # As `python SCRIPT ARGUMENTS` would.
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
