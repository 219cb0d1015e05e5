"""``mlflash doctor``: whether nodes, MPI and Slurm are as mlflash needs them, before a job runs.

In come a launch and the settings; out come findings, with what to do about each. It imports what it tries: `mpi`,
`memory`, `startup`, `checkpointer`.

`findings` defines the result of a check, and merges equal results of ranks to one line. `examination` makes the checks
in order. `watchdog` prints the results even if a check hangs or ends the process. The checks, by subject:
`launch_environment` (who started how many processes), `mpi_ranks` (MPI and its nodes), `rma`, `transports` (which one
is faster), `couriers`, `courier_trial` (whether MPI starts without a launcher), `memory`, `mounts`, `logind` and
`memory_need` (the memory of a job), `slurm`, `software`, `gpu`.
"""
