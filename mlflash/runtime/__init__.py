"""What the Checkpointer of one rank consists of, made in order and on all ranks.

In come the settings and the communicators; out come `Parts`: slots, protection, threads, and what was found in memory.
It imports the rooms that these parts are from.
"""
