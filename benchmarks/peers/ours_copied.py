"""mlflash with a copy of each slot on the other node, checksummed at both ends."""

from __future__ import annotations

import ours_alone


class Library(ours_alone.Library):
    """As alone, and copied."""

    redundancy = "copy"
