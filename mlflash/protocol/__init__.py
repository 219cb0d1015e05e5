"""The messages between a trainer and its courier, and the trainer's side of them.

In come calls from what saves and restores; out go messages to the courier. `messages` defines them;
`save_request` and `wanted_parts` are parts of messages. The trainer has a `client` that takes messages to the courier,
and a `trainer_context`, which the courier updates. `ranks` are the ranks of the run, and `torch_rank` finds them by the
numbers of PyTorch. `describe_ranks` is how ranks tell each other about a checkpoint that other ranks read. This room
imports the rooms that these data come from, and makes no MPI calls.
"""
