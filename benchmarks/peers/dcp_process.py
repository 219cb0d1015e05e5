"""torch.distributed.checkpoint.async_save by a process, with a stager that keeps its shared memory."""

from __future__ import annotations

import dcp_thread
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType


class Library(dcp_thread.Library):
    """As the thread; the process is started by the first save and stays."""

    kind = AsyncCheckpointerType.PROCESS
