"""Checkpoints in a framework's own files: the framework writes them to memory, and mlflash moves them to disk.

In come directories in memory, which a framework has written as it writes to disk (`background_files`), and out come the
same files at their place on disk, all of them or none. One process per rank moves them (`mover`) while training
continues. It goes on even if the rank ends. It also makes the checksums that torch has left out.
"""
