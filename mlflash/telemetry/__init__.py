"""Reports what happens to a rank to people and to programs that watch: events, metrics, and a heartbeat per rank.

In come the reports of the other packages, and out come files. Training never waits for them. At each commit, `recorder`
finds out which rank the commit waited for, and when that is worth a warning.
"""
