"""The commands of ``mlflash``: looking at checkpoints without disturbing the job, and rescuing them without it.

In come words of a command line; out go text or one JSON document, and an exit code. Each command is a module of its own
name. It imports the room of each command that has one, and `terminal`, which they all share.
"""
