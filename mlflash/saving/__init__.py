"""A save: tensors are copied to a slot, protected on other nodes, and committed on all ranks.

In comes a state, and out comes a `Snapshot`, which says how far the save is. Training waits only for `staging`. This
room imports `protocol` for what the trainer has, and `startup` for what the courier has.
"""
