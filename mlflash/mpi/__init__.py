"""MPI, and the one thread that calls it. mpi4py is imported nowhere else.

In come jobs; out come their results, or an error that all ranks agree on before their deadline. It imports `placement`
for the topology.
"""
