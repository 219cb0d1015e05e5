"""A restore: a committed checkpoint, in memory or in a directory, is loaded into the live state on all ranks.

In comes a live state, or nothing, and out comes the step that was loaded. Before the load, slots are chosen, verified,
fetched from other nodes, rebuilt from parity, and put together from other ranks' shards. While the courier has nothing
else to do, this room verifies what a restore would need (`scrubber`), and repairs damage (`heal`). It imports `saving`
to commit what was put together, and `draining` for checkpoints in a directory.
"""
