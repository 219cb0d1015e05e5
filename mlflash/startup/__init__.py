"""The creation of a Checkpointer: connect the ranks, lock the job, and take over what earlier runs left.

In come the settings and the communicators; out comes the `context` in which saving, draining and restoring work: slots,
protection, threads. This room imports the rooms that these come from.
"""
