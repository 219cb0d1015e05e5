"""Reads checkpoints from outside, while the job runs or after it has ended. It locks nothing and changes nothing.

In come names of jobs and directories, and out come their contents and damage. This room imports the rooms that read,
and no room that trains.

`node_memory` reads the headers of all nodes. `restorability` says what they can restore, and which losses that
survives. `on_disk` reads the directory, and compares files with the provenance of their checkpoint.
`checkpoint_contents` finds where each tensor is.
"""
