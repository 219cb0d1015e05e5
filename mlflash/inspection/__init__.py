"""A checkpoint looked at from outside, while its job runs or after it has ended; nothing is locked or changed.

`node_memory` reads the headers of all nodes, `restorability` says what these can give and what could still be lost;
`slot_file` reads a file in memory, `on_disk` the directory, `provenance_check` compares its files with what their
checkpoint says of them, `checkpoint_contents` says where each tensor lies.

In come names of jobs and directories; out come what lies there, and what is damaged. It imports the rooms that read,
and none that trains.
"""
