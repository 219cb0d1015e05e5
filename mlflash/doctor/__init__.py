"""``mlflash doctor``: before a job runs, it checks that nodes, MPI and Slurm are as mlflash needs them.

In come a launch and the settings, and out come findings, each with advice. This room imports what it tries: `mpi`,
`memory`, `startup`, `checkpointer`.

`findings` defines the result of a check, and merges equal results of ranks to one line. `examination` makes the checks
in order. `watchdog` prints the results even if a check hangs or ends the process. These modules have the checks:

    launch_environment   who started how many processes, and whether MPI agrees
    mpi_ranks            the MPI library, ranks and nodes
    rma                  one-sided communication, within a node and between nodes
    transports           which transport is faster
    couriers             which kind a job would have, and on which cores
    courier_trial        whether MPI starts without a launcher
    memory               the memory of a node and its limits
    memory_need          how much of that memory a job takes
    copying              how fast a process copies into slots
    mounts               whether all jobs on a node see the same directory
    logind               whether systemd deletes the memory of a user who logs out
    slurm                what Slurm does with memory between steps and jobs
    software, gpu        libraries and threads, and whether memory can be pinned for GPUs
"""
