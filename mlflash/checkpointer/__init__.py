"""`Checkpointer`, what adapters need from it, `off` where it is off, and `keep_alive`.

In come the calls of users and adapters, and out come their results. Each call goes to the package that does the work.
"""
