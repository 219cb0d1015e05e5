"""``mlflash report``: event logs → what happened to a job, as one page or one JSON document."""
