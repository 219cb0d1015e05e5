"""`Checkpointer`, how it ends (`ending`), its side for adapters, `own_files`, and a stand-in that does nothing.

Users and adapters call this room. It passes each call to the room that can do the work, and returns the result. It
imports every room that saves, restores or drains.
"""
