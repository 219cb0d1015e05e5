"""MPI, and the one thread that calls it. No other room communicates by MPI.

In come jobs; out come their results, or an error that all ranks agree on before their deadline. This room imports
`placement` for the topology.
"""
