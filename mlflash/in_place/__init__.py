"""Training that goes on in the same processes when others are lost: `keep_alive`.

In come a training function and the state that it changes; out comes what it returns. `decider_link` speaks with who
decides which process has which rank (`launcher.membership`), `groups` says what of torch.distributed must be exchanged
when ranks change hands; `mlflash.adapters.kept_groups` does so. A process that waits for a rank is forked from one that
has imported all (`forked_spare`). It imports what users call (`checkpointer`), and takes
couriers from one round to the next (`courier`).
"""
