"""Runs a script of NeMo on CPUs: ``nemo_script.py SCRIPT ARGUMENTS``."""

from __future__ import annotations

import os
import runpy
import sys

from nemo_on_cpu import on_cpu

if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = os.path.dirname(sys.argv[0])
    with on_cpu():
        runpy.run_path(sys.argv[0], run_name="__main__")
