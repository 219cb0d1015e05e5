"""Copies, parity and shares: a slot is sent to other nodes, and the receiver checks it.

In come slots, and which rank protects which, and out come copies and parity files on other nodes. While checksums are
made, `value_checks` looks for values from which no training continues.
"""
