"""What ``mlflash template`` does: write a batch script and the training that it starts, with nothing left to edit.

In come words of a command line and the partitions of Slurm; out go files, and the source of each value. It imports
`launcher` to ask Slurm, and `doctor` for the flag of srun that an MPI needs. The templates are `slurm/` of the
repository, installed as ``mlflash/slurm``.
"""
