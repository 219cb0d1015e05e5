"""The courier: it makes all MPI calls of a rank, and does what its trainer asks for.

In come the messages of `protocol`; out come their results. `session` has a handler for each of them, `restores` those
of restoring, `rank_report` what a rank tells of itself. `connect` starts it: `in_thread` as a thread of the trainer's
process, or as a process of its own, by `choice`. Of that the trainer has `in_process`, with the `courier_link` that
all its Checkpointers share (`linked`), a `remote_job` for all that is asked, `exchange_rounds` for what others send,
`told_plans`, the `told_drain`, and `units` of jobs that fail together; the process itself is `process_main`, with a
`hosted_session` for each Checkpointer and `remote_trainer` for whom it asks; they talk in `wire_format`. It imports all
that saves, restores and drains.
"""
