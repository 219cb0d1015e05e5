"""Draining: committed slots are copied to files in a directory.

In come committed slots, and out come files in a directory or bucket, as HDF5 or PyTorch DCP. Each rank has one file.
One more file commits the checkpoint and says what all ranks hold (`index`).
"""
