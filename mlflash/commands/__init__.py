"""The commands of ``mlflash``: each is a module of its name, and a thin one.

In come words of a command line; out go text or one JSON document, and an exit code. It imports the room that does the
work, and `command_line`, which all commands share.
"""
