"""A restore: a committed checkpoint, in the memory of any node or in a directory → the live state, on all ranks.

In comes a live state, or nothing; out comes the step that was loaded. On the way slots are chosen, verified, fetched
from other nodes, rebuilt from parity and put together from other ranks' shards. While nothing else has to be done, this
room verifies what a restore would need (`scrubber`), and repairs damage (`mend`). It imports `saving`, to commit what
was put together, and `draining` for checkpoints in a directory.
"""
