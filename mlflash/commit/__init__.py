"""A commit: all ranks announce a save, protect it, and agree that it counts; and what a courier knows for that.

`start` connects the ranks, finds what earlier runs left (`earlier_runs`), and makes the `courier_state`, with
which commits, drains and restores work. `certification` says which older steps stay.
"""
