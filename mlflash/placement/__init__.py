"""Where the nodes stand, and who protects whom.

In come the names of hosts, failure domains and a redundancy scheme; out goes for each rank whose copies or parity it
holds, and what may be lost at a time. Pure: neither files nor MPI. It imports only `errors`.
"""
