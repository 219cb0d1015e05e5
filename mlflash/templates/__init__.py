"""What ``mlflash template`` does: it writes a complete batch script and the training program that it starts.

In come words of a command line and the partitions of Slurm, and out go files and the source of each value. This room
imports `launcher` to ask Slurm, and `doctor` for the flag of srun that an MPI needs. The templates are in `slurm/` of
the repository, which is installed as ``mlflash/slurm``.
"""
