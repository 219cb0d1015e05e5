"""What ``mlflash run`` does: start the ranks of a job, and restart them after a failure with spares for lost nodes.

In come hosts or a Slurm allocation with the command of a rank, and out comes the exit code of the training. This room
imports `telemetry` to read what ranks report. It starts no MPI in its own process.

ssh or srun (`launch_systems`) starts an agent on each node, and `agents` talks to them. They start the ranks
(`started_ranks`). If the other processes stay when one is lost, `membership` decides which one has which rank.
"""
