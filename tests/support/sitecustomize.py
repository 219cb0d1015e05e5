"""What tests do to mlflash in processes that they start: Python imports this where it starts, as it is on PYTHONPATH.

MLFLASH_TEST_BLOCK_NBYTES sets the size of blocks in each process. MLFLASH_TEST_ARMS names a module of this folder whose
``arm`` is called in each courier, when it has the environment of its trainer.
"""

import importlib
import os
import sys

if "MLFLASH_TEST_BLOCK_NBYTES" in os.environ:
    from mlflash.state import layout

    layout.BLOCK_NBYTES = int(os.environ["MLFLASH_TEST_BLOCK_NBYTES"])
if any("mlflash.launch.agent" in word for word in sys.orig_argv) and "MLFLASH_TEST_ARMS" in os.environ:
    from mlflash.launch import courier_process

    inherit = courier_process._inherit

    def _inherit(inherited: courier_process.Inherited) -> None:
        inherit(inherited)
        if "MLFLASH_TEST_ARMS" in os.environ:
            importlib.import_module(os.environ["MLFLASH_TEST_ARMS"]).arm()

    courier_process._inherit = _inherit
