"""``mlflash demo``: a small GPT loses a node, and ends with the weights of an uninterrupted run."""
