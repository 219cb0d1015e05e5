"""What a trainer and its courier say to each other, and what the trainer has at its end.

In come the calls of what saves and restores; out go messages to the courier: `messages`, of which `save_request` and
`wanted_parts` are parts. The trainer has a `client` that takes them there, and a `trainer_context`, which the courier
tells what has changed; `ranks` are those of its run, and `torch_rank` finds them under the numbers of PyTorch. What
ranks tell each other of a checkpoint that others read is in `describe_ranks`. It imports the rooms that these data are
from, and makes no call of MPI.
"""
