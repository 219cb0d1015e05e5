"""Copies, parity and shares: how a slot gets to other nodes, where the receiver checks it.

The input is slots, and which rank protects which; the output is copies and parity files on other nodes. This room
imports `memory`, `placement` and `mpi`.
"""
