"""All trainings of `torch_table` in one state: saved, killed, restored in a new process, and compared.

    contract_job.py KIND DIRECTORY save       # trains, saves steps 3 and 4, and kills itself after two more
    contract_job.py KIND DIRECTORY restore    # restores each into trainings that are new, and into others that have
                                              # gone on, and notes what differs after two more steps

DIRECTORY gets a file for each rank, of what was computed before the kill.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from records import note
from torch_table import DDP, FSDP2, PLAIN, Training, made, of_kind, stepped

from mlflash import Checkpointer
from mlflash.adapters.distributed import init_process_group

# Within an epoch of a loader, and on its last batch; before and at the end of the first schedule of a sequence.
SAVED = (3, 4)
MORE = 2
# Into new trainings, and into those that have gone on; on ranks, which take longer, each step and each way once.
_ROUNDS = [(3, "stepped"), (4, "fresh")]
ROUNDS = {PLAIN: [(3, "fresh"), (4, "stepped"), *_ROUNDS], DDP: _ROUNDS, FSDP2: _ROUNDS}
Digests = dict[str, str]


def step(trainings: dict[str, Training], number: int) -> Digests:
    found = {name: stepped(name, training, number) for name, training in trainings.items()}
    return {f"{name}: {path}": value for name, values in found.items() for path, value in values.items()}


def all_made(kind: str) -> dict[str, Training]:
    with torch.random.fork_rng():
        return {name: made(kind, name) for name in of_kind(kind)}


def states(trainings: dict[str, Training]) -> dict[str, Any]:
    return {name: training.state for name, training in trainings.items()}


def save(ckpt: Checkpointer, kind: str, file: Path) -> None:
    trainings = all_made(kind)
    torch.manual_seed(100 + (dist.get_rank() if dist.is_initialized() else 0))
    computed = {}
    for number in range(1, SAVED[-1] + MORE + 1):
        computed[number] = step(trainings, number)
        if number in SAVED:
            ckpt.save(number, states(trainings)).wait()
    file.write_text(json.dumps(computed))
    note("saved", entries=len(trainings))
    if dist.is_initialized():
        dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def restore(ckpt: Checkpointer, kind: str, file: Path) -> None:
    wanted = json.loads(file.read_text())
    for at, way in ROUNDS[kind]:
        trainings = all_made(kind)
        if way == "stepped":
            for number in (51, 52):
                step(trainings, number)
        assert ckpt.restore(states(trainings), step=at) == at
        for training in trainings.values():
            training.begin()
        for number in range(at + 1, at + MORE + 1):
            found = step(trainings, number)
            expected = wanted[str(number)]
            unlike = [key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key)]
            wrong = sorted(f"{key}: {found.get(key)} != {expected.get(key)}" for key in unlike)
            note("compared", at=at, way=way, step=number, wrong=wrong, leaves=len(found))
            if (at, way) == ROUNDS[kind][-1]:  # what it saves takes the place of both steps
                ckpt.save(number, states(trainings)).wait()
    note("end", entries=len(trainings))


def main() -> None:
    kind, directory, task = sys.argv[1:]
    torch.set_num_threads(1)
    if kind != PLAIN:
        init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    note("start")
    with Checkpointer(job=kind, strict=True, redundancy="none" if kind == PLAIN else "copy") as ckpt:
        (save if task == "save" else restore)(ckpt, kind, Path(directory, f"computed-{rank}"))
    if kind != PLAIN:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
