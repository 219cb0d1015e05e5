"""What ``mlflash top`` shows: it reads the heartbeats of the ranks, keeps a history, and draws a page of the terminal.

In come the hosts of a job; out goes a page that is redrawn every few seconds. It imports `launcher`, which reaches the
hosts.
"""
