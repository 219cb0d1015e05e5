"""How a trainer reaches its courier: calls, and what they carry.

The `client` of each Checkpointer calls methods of its session in the courier. The clients of the same ranks share a
`connection`, which starts couriers, and the next ones if one has ended. The `channel` is the socket, with frames.
`records` and `ranks` have what the calls carry.
"""
