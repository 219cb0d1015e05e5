"""What ``mlflash run`` does: start the ranks of a job, and restart them after a failure with spares for lost nodes.

In come hosts or a Slurm allocation with the command of a rank, and out comes the exit code of the training. Nothing
here starts MPI.

ssh (`on_ssh`) or srun (`on_slurm`) starts an agent on each node, and `agents` talks to them. They start the ranks
(`started_ranks`). If the other processes stay when one is lost (`kept_ranks`), `membership` decides which one has which
rank. In such a process, `decider_link` hears what was decided.
"""
