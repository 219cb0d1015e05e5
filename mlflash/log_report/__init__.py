"""What ``mlflash report`` makes from event logs: the history of a job, as one page or one JSON document.

In come the lines of logs, and out goes HTML that needs no network, or JSON. This room imports only `human_readable`.
"""
