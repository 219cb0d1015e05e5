"""What all commands share: options, the choice of the job, shell completion, ranks and output.

In come words of a command line, and out come settings, tables, JSON and progress on a terminal. This room imports
`inspection` to complete names of jobs and steps. It imports `wireup` to give the ranks of a command MPI if no MPI
launcher started them (`run_on_ranks`).
"""
