"""What ``mlflash template`` does: write a batch script and the training that it starts, with nothing left to edit.

In come words of a command line and what Slurm says of its partitions; out go files, and where each value is from. It
imports `launcher` to ask Slurm, and `doctor` for what an MPI wants of srun. The templates are `slurm/` of the
repository, installed as ``mlflash/slurm``.
"""
