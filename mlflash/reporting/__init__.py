"""``mlflash report``: event logs → what happened to a job, as one page or one JSON document.

In come the lines of logs; out goes HTML without a network, or JSON. It imports only what all commands share.
"""
