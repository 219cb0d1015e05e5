"""``mlflash plan``: what each redundancy scheme costs and survives, and how often to save, before a job runs.

In come sizes, nodes and failure rates; out come tables and curves. It imports `placement`, and runs nothing.
"""
