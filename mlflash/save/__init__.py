"""The trainer's half of a save: its state is copied into a slot, at once or before the next step.

In comes a state, and out comes a `Snapshot`, which says how far the save is. Training waits only for `stage`. The rest
of a save happens in the courier (`commit`).
"""
