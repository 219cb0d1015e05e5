"""mlflash with a copy of each slot on the other node. Both ends check every byte."""

from __future__ import annotations

import ours_alone


class Library(ours_alone.Library):
    """The same as without redundancy, with a copy in addition."""

    redundancy = "copy"
