"""What ``mlflash run`` does: it starts the ranks of a job, and after a failure again, with spares for dead nodes.

In come hosts or a Slurm allocation, and the command of a rank; out comes the exit code of the training. This room
imports `telemetry` to read what ranks report, and it starts no MPI in its own process.

Ranks are started by srun (`on_slurm`), by mpiexec (`on_hosts`) or by ssh alone (`on_ssh`). With ssh, `ranks_by_ssh`
talks to a `host_agent` on each host, and `line_stream` passes on their output in whole lines. Under Slurm a separate
step starts the couriers of all ranks (`courier_hosts`). If processes stay when others are lost (`kept_ranks`),
`membership` decides which process has which rank, `member_service` talks to all processes, and `kept_processes` is the
side of the agents.
"""
