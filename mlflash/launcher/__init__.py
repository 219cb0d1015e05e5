"""What ``mlflash run`` does: start the ranks of a job, and after a failure again, with spares in place of dead nodes.

In come hosts or a Slurm allocation and the command of a rank; out comes the exit code of a training that has ended. It
imports `telemetry` for what ranks say of themselves, and starts no MPI in its own process. Under Slurm it has the
ranks' couriers started by a step of their own (`courier_hosts`). Ranks are started by srun (`on_slurm`), by mpiexec
(`on_hosts`), or by ssh alone (`on_ssh`): then `ranks_by_ssh` speaks with a `host_agent` on each host, and what these
print goes on in whole lines (`line_stream`). Where processes stay that have lost others (`kept_ranks`), `membership`
decides which one has which rank, `member_service` speaks with them all, and an agent's side is `kept_processes`.
"""
