"""``mlflash demo``: a small GPT loses a node, or a rank, and ends with the weights of an uninterrupted run.

In come a few options; out come the account of two runs, and their weights. It imports `mlflash` as a
user does, and `launcher` to start processes.
"""
