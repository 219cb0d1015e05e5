"""Copies, parity and shares: how a slot gets to other nodes, where the receiver checks it.

In come slots, and which rank protects which; out come copies and parity files on other nodes. This room imports
`memory`, `placement` and `mpi`.
"""
