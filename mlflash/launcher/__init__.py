"""What ``mlflash run`` does: start the ranks of a job, and after a failure again, with spares in place of dead nodes.

In come hosts or a Slurm allocation and the command of a rank; out comes the exit code of a training that has ended. It
imports `telemetry` for what ranks say of themselves, and starts no MPI in its own process.
"""
