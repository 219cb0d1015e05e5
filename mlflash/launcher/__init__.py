"""What ``mlflash run`` does: start the ranks of a job, and restart them after a failure with spares for lost nodes.

In come hosts or a Slurm allocation with the command of a rank, and out comes the exit code of the training. This room
imports `telemetry` to read what ranks report. It starts no MPI in its own process.

It starts ranks by srun (`on_slurm`), by mpiexec (`on_hosts`) or by ssh alone (`ranks_by_ssh`, with a `host_agent` on
each host). If the other processes stay when one is lost (`kept_ranks`), `membership` decides which has which rank.
"""
