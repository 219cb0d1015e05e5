"""The courier: it makes all MPI calls of a rank and does what its trainer asks for.

In come the messages of `protocol`, and out come their results. `session` has a handler for each message, and
`restores` has those for restoring. This room imports all rooms that save, restore and drain.

`connect` starts the courier, which is a process of its own. The trainer has an `in_process` object for each
Checkpointer. Those of the same ranks share one `courier_link` (`linked`). Each job is a `remote_job`.
`exchange_rounds` receives what other ranks send. `units` groups jobs that fail together.

The courier runs `process_main`, with a `hosted_session` for each Checkpointer and a `remote_trainer` to ask the
trainer. Both sides talk in `wire_format`.
"""
