"""The messages between a trainer and its courier, and the trainer's side of them.

In come the calls of saves and restores, and out go messages to the courier. `messages` defines these, and
`save_request` and `wanted_parts` are parts of them.

The trainer has a `client` that takes messages to the courier, and a `trainer_context` that the courier updates. `ranks`
are the ranks of the run, and `torch_rank` converts PyTorch's numbers of ranks to them. With `describe_ranks` the ranks
tell each other what the ranks of an old checkpoint hold. This room imports the rooms that define these data, and makes
no MPI calls.
"""
