"""Reports what happens to a rank, to people and to programs that watch: events, metrics, a heartbeat per rank.

With each commit, `lateness` finds out which rank it waited for, and `stragglers` decides when that is worth a warning.
In come the reports of the other rooms; out come files. Training never waits for this room. It imports `memory`, because
the heartbeats are there.
"""
