"""What one node's memory holds for a job: a directory of slots, written and read by the ranks of that node.

The input is sizes and the bytes of leaves; the output is slots, their headers, and an inventory of what earlier runs
left. A rank does all of it alone. This room imports `state`.
"""
