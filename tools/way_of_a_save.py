"""Counts the files and classes of mlflash that a save crosses, in a trainer and in its courier.

Two ranks on two emulated nodes save a state several times; counted is what ran in each of these saves, from the call of
`Checkpointer.save` until the snapshot has ended. Usage: python tools/way_of_a_save.py [--list]
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import mlflash

_SAVES, _LIMIT_S = 5, 60
_OUT = "WAY_OF_A_SAVE"  # the directory of the tallies
_LABEL = "tally"


class Tally:
    """The functions of mlflash that this process calls, by the number of the save that runs; 0: none does."""

    def __init__(self, name: str):
        self._path = Path(os.environ[_OUT])
        with open(self._path / _LABEL, "r+b") as file:
            self.now = mmap.mmap(file.fileno(), 1)
        self._home = os.path.join(os.path.dirname(mlflash.__file__), "")
        self._name, self._seen = name, [set[tuple[str, str]]() for _ in range(_SAVES + 1)]

    def begin(self) -> None:
        sys.setprofile(self._note)
        threading.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and self.now[0]:
            code = frame.f_code
            if code.co_filename.startswith(self._home):
                self._seen[self.now[0]].add((code.co_filename.removeprefix(self._home), code.co_qualname))

    def write(self) -> None:
        always = set.intersection(*self._seen[1:])
        self._path.joinpath(self._name).write_text(json.dumps(sorted(always)))


def run(forked: Any) -> None:
    """Be a courier that is counted. The entry point of the forked process."""
    from mlflash.courier import main as courier_main

    tally = Tally(f"courier-{forked.rank}")
    tally.begin()
    courier_main.run(forked)
    tally.write()


def train(rank: int) -> None:
    """Be a rank that saves."""
    import numpy as np

    from mlflash import Checkpointer
    from mlflash.channel import connection

    connection.ENTRY = "way_of_a_save:run"
    tally = Tally(f"trainer-{rank}")
    tally.begin()
    memory = os.environ[_OUT] + f"/node{rank}"
    os.mkdir(memory)
    with Checkpointer(job="way", memory=memory, node=f"node{rank}", redundancy="copy", timeout_s=_LIMIT_S) as ckpt:
        state = {"weights": np.ones(1 << 20), "epoch": 0}
        for step in range(3):  # until slots and layout are there
            ckpt.save(step, state).wait()
        for save in range(1, _SAVES + 1):
            if rank == 0:
                tally.now[0] = save
            ckpt.save(2 + save, state).wait()
        tally.now[0] = 0
    tally.write()


def main() -> int:
    """Start two ranks, or be one of them."""
    if "RANK" in os.environ and _OUT in os.environ:
        train(int(os.environ["RANK"]))
        return 0
    with tempfile.TemporaryDirectory(dir="/dev/shm") as out, socket.create_server(("127.0.0.1", 0)) as free:
        Path(out, _LABEL).write_bytes(bytes(1))
        port, paths = free.getsockname()[1], [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        common = {**os.environ, _OUT: out, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                  "PYTHONPATH": os.pathsep.join(filter(None, paths))}  # fmt: skip
        ranks = [subprocess.Popen([sys.executable, __file__], env={**common, "RANK": str(rank)}) for rank in range(2)]
        if sum(rank.wait(_LIMIT_S) for rank in ranks):
            return 1
        seen = [tuple(one) for who in ("trainer-0", "courier-0") for one in json.loads(Path(out, who).read_text())]
    files = sorted({file for file, _ in seen})
    classes = sorted({name.split(".")[0] for _, name in seen if "." in name and "<locals>" not in name.split(".")[:2]})
    if "--list" in sys.argv:
        print("\n".join([*files, "", *classes, ""]))
    print(f"a save crosses {len(files)} files and {len(classes)} classes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
