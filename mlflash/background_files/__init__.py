"""Checkpoints in a framework's own files: written to memory by the framework, moved to disk behind training.

In come directories in memory that a framework has written as it writes to disk (`staged`); out come the same files in
their place, all of them or none. A process beside each rank moves them (`mover`), and outlives it; it makes the
checksums that torch has left out (`zip_checksums`). This room imports nothing but `memory`, for where memory is.
"""
