"""MPI, and the one thread that calls it. No other room communicates by MPI.

In come jobs, and out come their results, or an error on which all ranks agree before their deadline. This room imports
`placement` for the topology.
"""
