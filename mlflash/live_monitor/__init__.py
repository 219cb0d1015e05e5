"""What ``mlflash top`` shows: it reads the heartbeats of the ranks, keeps a history, and draws a page of the terminal.

In come the hosts of a job, and out goes a page that is drawn again every few seconds. This room imports `launcher`,
which reaches the hosts.
"""
