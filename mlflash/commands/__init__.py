"""The commands of ``mlflash``: each has a short module of its own.

In come words of a command line, and out go text or one JSON document, and an exit code. This room imports the rooms
that do the work, and `command_line`, which all commands share.
"""
