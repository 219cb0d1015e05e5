"""What one node's memory holds for a job: a directory of slots, written and read by the ranks of that node.

In come sizes and the bytes of leaves; out come slots, their headers, and an inventory of what earlier runs left. A rank
does all of it alone. This room imports `state`.
"""
