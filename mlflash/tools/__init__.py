"""The commands of ``mlflash``. `cli` says which module has each; modules that begin with its name belong to it.

In come words of a command line, and out go text or one JSON document, and an exit code. All of them look at a job from
outside. `node_memory` and `on_disk` read checkpoints; `options`, `output`, `run_on_ranks` and `jobs.choose_job` are for
all commands.
"""
