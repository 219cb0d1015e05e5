"""What happens to a rank, told to people and to programs that watch: events, metrics, a heartbeat per rank.

`lateness` finds out, with each commit, which rank it waited for, and `stragglers` when that is worth a warning.
In comes what the other rooms report; out go files. Nothing that trains ever waits for it. It imports `memory`, where a
heartbeat lies.
"""
