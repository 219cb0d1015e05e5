"""What stands beside `Checkpointer`: its side for adapters, its stand-in that does nothing, its report.

In come the calls of users and adapters; they are passed on. It imports all that saves, restores and drains.
"""
