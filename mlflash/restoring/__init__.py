"""A restore: a committed checkpoint → the live state, on all ranks or on none.

In comes a live state, or none; out goes the step it was filled with. Other ranks, other shards and drained checkpoints
are put together first. It imports `recovery`, `saving` and `draining`.
"""
