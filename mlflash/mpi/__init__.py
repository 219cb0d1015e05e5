"""MPI, and the one thread that calls it. No other room communicates by MPI.

The input is jobs. The output is their results, or an error that all ranks agree on before their deadline. The room
imports `placement` for the topology.
"""
