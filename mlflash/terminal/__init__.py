"""What all commands share: their options, what completes them, how they look at memory and directories, units.

In come words of a command line; out come values, tables and lines of text. It imports rooms that read what is there,
and none that trains.
"""
