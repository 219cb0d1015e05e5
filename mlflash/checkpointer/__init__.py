"""`Checkpointer`, how it ends (`ending`), its side for adapters, `own_files`, and a stand-in that does nothing.

In come the calls of users and adapters; out come their results. Each call goes to the room that can do the work. It
imports every room that saves, restores or drains.
"""
