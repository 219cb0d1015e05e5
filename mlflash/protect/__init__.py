"""Copies, parity and shares: a slot is sent to other nodes, and the receiver checks it.

In come slots, and which rank protects which, and out come copies and parity files on other nodes. While checksums are
made, `examiner` looks for values from which no training continues.
"""
