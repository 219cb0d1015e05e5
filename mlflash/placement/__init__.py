"""Where the nodes are, and which rank protects which.

In come the names of hosts, failure domains and a redundancy scheme. For each rank, out come the ranks whose copies or
parity it holds, and what may be lost at the same time. Nothing here uses files or MPI.
"""
