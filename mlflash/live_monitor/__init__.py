"""What ``mlflash top`` shows: heartbeats of the ranks → a look → what has come by so far → a page of the terminal.

In come the hosts of a job; out goes a page that is drawn anew every few seconds. It imports `launcher`, which reaches
the hosts.
"""
