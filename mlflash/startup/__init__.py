"""The creation of a Checkpointer: connect the ranks, lock the job, and take over what earlier runs left.

The input is the settings and the communicators. The output is the `context` in which saving, draining and restoring
work: slots, protection, threads. The room imports the rooms that these come from.
"""
