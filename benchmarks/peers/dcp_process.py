"""torch.distributed.checkpoint.async_save that writes in a process, with a stager that keeps its shared memory."""

from __future__ import annotations

import dcp_thread
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType


class Library(dcp_thread.Library):
    """The same as the variant with a thread. The first save starts the process, and later saves use it again."""

    kind = AsyncCheckpointerType.PROCESS
