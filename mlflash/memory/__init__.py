"""What the memory of one node holds for a job: a directory of slots, which the ranks of that node write and read.

In come sizes and the bytes of leaves, and out come slots, their headers, and an inventory of what earlier runs left.
Each rank does all of this alone.
"""
