"""Runs a script, and ends where Python would take itself apart: gloo's threads may abort a process there.

They drop the tensors of the last collective when they come to it, and wait for the interpreter to do so. If it is being
finalized, Python before 3.14 ends such a thread, and C++ the process ("terminate called without an active exception";
pytorch/pytorch#190489).
"""

import os
import runpy
import sys

sys.argv.pop(0)
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
