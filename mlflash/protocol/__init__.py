"""How a trainer reaches its courier, and what the two tell each other.

In come the calls of saves and restores, and out go calls to the courier. Each end of the `channel` calls methods at the
other end. The trainer has a `client` for each Checkpointer, and those of the same ranks share one `courier_link`
(`linked`). `records` and `wanted_parts` are what the calls carry, and `exchange_rounds` receives what other ranks send.

`ranks` are the ranks of the run, and `trainer_context` is what the courier updates. With `describe_ranks` the ranks
tell each other what the ranks of an old checkpoint hold. This room makes no MPI calls, except that a program which uses
MPI itself carries an address by it.
"""
