"""MPI, and the one thread that calls it. Nothing else communicates by MPI.

In come jobs, and out come their results, or an error on which all ranks agree before their deadline.
"""
