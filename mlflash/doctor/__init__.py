"""``mlflash doctor``: whether nodes, MPI and Slurm are as mlflash needs them, before a job runs.

In come a launch and the settings; out come findings, with what to do about each. It imports what it tries: `mpi`,
`memory`, `startup`, `checkpointer`.

`findings` is what a check says, and how equal results of ranks become one line. `examination` makes the checks in
order; `watchdog` sees to it that something is said even where a check hangs, or takes the process with it. The checks,
by subject: `launch_environment` (who started how many processes), `mpi_ranks` (MPI and its nodes), `rma`, `transports`
(which is faster), `couriers`, `courier_trial` (whether MPI starts without a launcher), `memory`, `mounts`, `logind`
and `memory_need` (what a job takes), `slurm`, `software`, `gpu`.
"""
