"""Reports what happens to a rank, to people and to programs that watch: events, metrics, a heartbeat per rank.

With each commit, `lateness` finds out which rank it waited for, and `stragglers` decides when that is worth a warning.
The input is what the other rooms report; the output is files. Training never waits for this room. It imports `memory`,
because the heartbeats are there.
"""
