"""What all commands share: their options, the job that they are about, shell completion, ranks, output.

In come words of a command line; out come settings, and tables, JSON and progress on a terminal. It imports `inspection`
to offer what is there, and `wireup`, by which ranks of a command have MPI where no launcher of MPI has started them
(`wired_ranks`).
"""
