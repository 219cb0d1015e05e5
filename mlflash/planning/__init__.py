"""``mlflash plan``: what each redundancy scheme costs and survives, and how often to save, before a job runs.

In come sizes, nodes and failure rates, and out come tables and curves. This room imports `placement`, and starts no
job.
"""
