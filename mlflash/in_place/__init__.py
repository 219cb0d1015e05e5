"""Training that continues in the same processes when other processes are lost: `keep_alive`.

In come a training function and the state that it changes, and out comes what the function returns.

`decider_link` talks to `launcher.membership`, which decides which process has which rank. `adapters.kept_groups`
replaces what of torch.distributed knows ranks. A process that waits for a rank is forked from one that has already
imported everything (`forked_spare`).

This room imports `checkpointer`, whose calls the user makes, and `courier`, to keep couriers from one call of the
training function to the next.
"""
