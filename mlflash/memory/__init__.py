"""What one node's memory holds for a job: a directory of slots, written and read by the ranks of that node.

In come sizes and leaves' bytes; out come slots, their headers, and an inventory of what earlier runs have left. A rank
does all of it alone. It imports `state`.
"""
