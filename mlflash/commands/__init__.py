"""The commands of ``mlflash``: looking at checkpoints without disturbing the job, and rescuing them without it.

`options` is what they share. `looking` reads the headers of all nodes, `outlook` says what these can give; `sealed`
reads a file in memory, `on_disk` one in the directory. Each command is a module of its own name.
"""
