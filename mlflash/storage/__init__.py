"""Directories, buckets, and the formats of the files in them.

In come bytes and paths or URLs, and out come files that PyTorch opens without mlflash.
"""
