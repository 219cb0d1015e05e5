"""``mlflash demo``: train a small GPT, kill a node or a rank, and end with the weights of an uninterrupted run.

In come a few options, and out come a summary of two runs and their weights. This room imports `mlflash` as a user does,
and `launcher` to start processes.
"""
