"""``mlflash doctor``: before a job runs, it checks that nodes, MPI and Slurm are as mlflash needs them.

In come a launch and the settings (`context`), and out come `findings`, each with advice. This room imports what it
tries: `mpi`, `memory`, `startup`, `courier`. `examination` makes the checks in order: `software_checks`,
`node_checks`, `mpi_checks`, and those of `couriers`. `watchdog` prints the results even if a check hangs or ends the
process.
"""
