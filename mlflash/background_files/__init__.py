"""Checkpoints in a framework's own files: the framework writes them to memory, and mlflash moves them to disk.

In come directories in memory, which a framework has written as it writes to disk (`staged`); out come the same files at
their place on disk, all of them or none. A process of each rank moves them (`mover`) during training, and outlives the
rank; it also makes the checksums that torch has left out (`zip_checksums`). This room imports only `memory`, to find
the memory.
"""
