"""`Checkpointer`, what adapters need from it, and `disabled` where it is off.

In come the calls of users and adapters, and out come their results. Each call goes to the room that does the work. This
room imports every room that saves, restores or drains.
"""
