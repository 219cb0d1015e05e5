"""The start of a Checkpointer: it connects the ranks, locks the job, and takes over what earlier runs left.

In come the settings and the communicators, and out comes the `context`. Saving, draining and restoring work with its
slots, its protection and its threads. This room imports the rooms that define these.
"""
