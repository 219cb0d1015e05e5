"""The process of a courier: it makes all MPI calls of a rank and does what its trainer asks for.

In come calls of the trainer, and out come their results. `main` is the process, with the thread of each Checkpointer
and the questions to the trainer. `session` has what a trainer can call. No trainer imports this package.
"""
