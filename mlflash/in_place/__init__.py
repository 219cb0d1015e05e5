"""Training that continues in the same processes when other processes are lost: `keep_alive`.

In come a training function and the state that it changes; out comes what the function returns. `decider_link` talks to
`launcher.membership`, which decides which process has which rank. `groups` defines what of torch.distributed must be
replaced when ranks change hands; `mlflash.adapters.kept_groups` replaces it. A process that waits for a rank is forked
from one that has already imported everything (`forked_spare`). This room imports `checkpointer`, whose calls the user
makes, and takes couriers from one round to the next (`courier`).
"""
