"""Copies, parity and shares: how a slot gets to other nodes, checked where it arrives.

In come slots and who protects whom; out go copies and parity files on other nodes. It imports `memory`, `placement` and
`mpi`.
"""
