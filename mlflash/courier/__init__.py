"""The courier: it makes all MPI calls of a rank, and does what its trainer asks for.

In come the messages of `protocol`; out come their results. `session` has a handler for each of them, `restores` those
of restoring, `rank_report` what a rank tells of itself; `in_thread` is the courier as a thread of the trainer's
process, and `connect` starts it. It imports all that saves, restores and drains.
"""
