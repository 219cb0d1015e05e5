"""What ``mlflash report`` makes: event logs → what happened to a job, as one page or one JSON document.

In come the lines of logs; out goes HTML without a network, or JSON. It imports only how people read numbers, and
`planning` for the best interval.
"""
