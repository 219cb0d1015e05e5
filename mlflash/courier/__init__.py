"""How a trainer reaches its courier, and what the courier knows.

In the trainer, each Checkpointer has a `client`, which calls methods of its session in the courier. The clients of the
same ranks share a `connection`, which starts couriers, and starts them anew if one has ended. It sends the calls over a
`channel`, the socket between two processes. `records` and `ranks` have what the calls carry.

In the courier, `start` connects the ranks and finds what earlier runs left (`choose_checkpoint`), and makes the `state`
of the courier, with which commits, drains and restores work.
"""
