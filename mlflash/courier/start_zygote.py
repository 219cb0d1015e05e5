"""The first thing that is done for a courier that is a process: its zygote starts.

The zygote imports while this process does. So nothing is imported here that takes time: what the trainer has at its
end, `courier_link` and `in_process`, comes after it.
"""

from __future__ import annotations

import os

from ..wireup.rendezvous import who_am_i
from ..wireup.zygote_client import ZygoteClient

ENTRY = "mlflash.courier.process_main:run"
"""What a courier does."""


def start_zygote() -> ZygoteClient:
    """Start the zygote of this process. Not collective.

    Raises:
        WorldMismatch: the launcher's variables and torch.distributed contradict each other.
    """
    return ZygoteClient([ENTRY], os.environ, mpi=who_am_i(os.environ).size > 1)
