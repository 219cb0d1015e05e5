"""Look at checkpoints from outside, while the job runs or after it has ended, without locking or changing anything.

`node_memory` reads the headers of all nodes. `restorability` says what they can restore and which losses that survives.
`slot_file` reads a file in memory, and `on_disk` reads the directory. `provenance_check` compares files with the
provenance of their checkpoint. `checkpoint_contents` finds where each tensor is.

In come names of jobs and directories; out come their contents and damage. It imports the rooms that read, and none that
trains.
"""
