"""A restore: a committed checkpoint, in the memory of any node or in a directory → the live state, on all ranks.

In comes a live state, or none; out goes the step it was filled with. On the way slots are chosen, verified, fetched
from other nodes, rebuilt from parity and put together from other ranks' shards. While nothing else is to be done, what
a restore would need is verified (`scrubber`), and damage is mended (`mend`). It imports `saving`, to commit what was
put together, and `draining` for checkpoints in a directory.
"""
