"""A save: tensors → a slot → protected on other nodes → committed on all ranks.

In comes a state; out goes a `Snapshot`, which says how far it is. Training waits for `staging` only. It imports
`protocol` for what the trainer has, and `startup` for what the courier has.
"""
