"""The courier: it makes all MPI calls of a rank and does what its trainer asks for.

In come the calls of `protocol`, and out come their results. `main` is the process, with the thread of each
Checkpointer and the questions to the trainer. `session` has what a trainer can call, and `restores` what it calls to
restore. This room imports all rooms that save, restore and drain, and no room imports it.
"""
