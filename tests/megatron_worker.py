"""Rank program for tests that kill and relaunch: a small GPT trained by Megatron."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from megatron_pretrain import pretrain
from records import note
from traps import set_traps

from mlflash.adapters.distributed import init_process_group
from mlflash.adapters.megatron import install
from mlflash.wireup.launcher_variables import launched


def main(last: int, flags: Sequence[str] = (), traps: Sequence[dict[str, object]] = ()) -> None:
    """Train to a step, from the newest checkpoint there is."""
    set_traps(traps, launched(os.environ).rank)
    init_process_group(host="127.0.0.1")
    note("start")
    install()
    pretrain(["--exit-interval", str(last), *flags])


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
