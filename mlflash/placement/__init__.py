"""Where the nodes are, and which rank protects which.

In come the names of hosts, failure domains and a redundancy scheme; out come, for each rank, the ranks whose copies or
parity it holds, and what may be lost at the same time. Pure: neither files nor MPI. This room imports only `errors`.
"""
