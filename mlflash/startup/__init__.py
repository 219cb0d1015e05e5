"""What happens when a Checkpointer is made: the ranks connect, lock the job, and take over what earlier runs left.

In come the settings and the communicators; out comes the `context` that saving, draining and restoring work in: slots,
protection, threads. It imports the rooms that these are from.
"""
