"""A restore: a committed checkpoint, in memory or in a directory, is loaded into the live state on all ranks.

In comes a live state, or nothing, and out comes the step that was loaded. Before the load, slots are chosen (`choose`),
verified and fetched from other nodes (`fetch`), and put together from other ranks' shards (`reshard`). Then they are
loaded (`load`). Copies and parity that are missing are made, and bad blocks are repaired from them (`repair`). While
the courier has nothing else to do, it verifies what a restore would need (`scrub`).
"""
