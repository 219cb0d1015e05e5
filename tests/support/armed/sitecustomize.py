"""Arms the named points of mlflash in the couriers of a test that are processes: Python imports it where it starts.

Whoever starts trainers puts this folder on their PYTHONPATH; MLFLASH_TEST_ARMS names a module beside it whose
``arm`` is called in each zygote, before it forks couriers.
"""

import importlib
import os
import sys
from pathlib import Path

if "mlflash.wireup.zygote" in sys.orig_argv and "MLFLASH_TEST_ARMS" in os.environ:
    sys.path.append(str(Path(__file__).parents[1]))
    importlib.import_module(os.environ["MLFLASH_TEST_ARMS"]).arm()
