"""`Checkpointer`, how it ends (`ending`), its side for adapters, `own_files`, and its stand-in that does nothing.

In come the calls of users and adapters; out go their results, when the room has done it that can. It imports all that
saves, restores and drains.
"""
