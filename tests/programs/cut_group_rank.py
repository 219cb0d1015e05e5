"""One rank of a test: it waits in collectives of gloo again and again, while its groups are cut.

Usage: cut_group_rank.py RANK SIZE ROUNDS FILE
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from waiting import take

from mlflash.adapters import kept_groups

RANK, SIZE, ROUNDS = map(int, sys.argv[1:4])
PATIENCE, LONG = timedelta(seconds=60), timedelta(seconds=600)


def cut_later(number: int) -> None:
    take(random.Random(number).uniform(0.0, 0.05))  # the same moment on all ranks, or nearly so
    kept_groups.cut_all()


def main() -> None:
    kept_groups.register()
    store = dist.FileStore(sys.argv[4], SIZE)
    dist.init_process_group(
        kept_groups.BACKEND, rank=RANK, world_size=SIZE, store=dist.PrefixStore("first", store), timeout=LONG
    )
    tensors = [torch.ones(1000) for _ in range(4)]
    for number in range(ROUNDS):
        store.set(f"begins/{number}/{RANK}", "")
        store.wait([f"begins/{number}/{rank}" for rank in range(SIZE)], PATIENCE)
        cut = threading.Thread(target=cut_later, args=(number,))
        cut.start()
        with contextlib.suppress(RuntimeError, ConnectionError):
            while True:
                for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                    work.wait()
        cut.join()
        kept_groups.exchange_all(dist.PrefixStore(f"round {number}", store), LONG)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [SIZE] * 3
    print("well", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
