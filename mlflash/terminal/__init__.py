"""What all commands share: their options, what completes them, how they look at memory and directories, units.

`options` is what they are called with. `looking` reads the headers of all nodes, `outlook` says what these can give;
`sealed` reads a file in memory, `on_disk` one in the directory.

In come words of a command line; out come values, tables and lines of text. It imports rooms that read what is there,
and none that trains.
"""
