"""A trainer for tests/programs/test_wireup.py: does what the test asks through the store, and never touches MPI."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from waiting import PATIENCE_S, hang

from mlflash.errors import DeadlineExceeded
from mlflash.wireup.launcher_variables import launched
from mlflash.wireup.store_client import StoreClient
from mlflash.wireup.zygote_client import ZygoteClient, ZygoteLost, ZygoteRefused

ENTRIES = [f"wireup_courier:{name}" for name in ("serve", "before_mpi", "exits", "raises", "speaks_no_pmi")]


class Trainer:
    def __init__(self, store: StoreClient, address: tuple[str, int], token: str, rank: int):
        self.store, self.address, self.token, self.rank = store, address, token, rank
        self.zygote = ZygoteClient(ENTRIES)
        self.couriers: dict[int, socket.socket] = {}
        self.pid = 0  # of the newest

    def fork(
        self, epoch: str, nodes: list[int], entry: str = "serve", rank: int | None = None, token: str | None = None
    ) -> int | str:
        mine, its = socket.socketpair()
        with its:
            try:
                self.pid = self.zygote.fork(
                    f"wireup_courier:{entry}",
                    epoch,
                    self.rank if rank is None else rank,
                    nodes,
                    self.address,
                    token or self.token,
                    its.fileno(),
                    PATIENCE_S,
                )
            except (ZygoteRefused, ZygoteLost) as refused:
                mine.close()
                return str(refused)
        mine.settimeout(PATIENCE_S)
        self.couriers[self.pid] = mine
        return self.pid

    def start(self, epoch: str, nodes: list[int]) -> list[float]:
        """Fork a courier, and do an allreduce: milliseconds of the fork, until MPI was up, and of both."""
        begun = time.monotonic()
        self.fork(epoch, nodes)
        forked = time.monotonic()
        assert self.zygote.wait_up(self.pid, PATIENCE_S), self.zygote.ended
        up = time.monotonic()
        assert self.tell("sum", self.rank + 1) == [self.rank, len(nodes), sum(range(1, len(nodes) + 1))]
        return [1e3 * (moment - begun) for moment in (forked, up, time.monotonic())]

    def tell(self, *command: Any) -> Any:
        courier = self.couriers[self.pid]
        with courier.makefile("rw") as lines:
            lines.write(json.dumps(command) + "\n")
            lines.flush()
            return json.loads(lines.readline() or "null")

    def wait(self) -> list[Any]:
        end = self.zygote.wait(self.pid, PATIENCE_S)
        self.couriers.pop(self.pid).close()
        return [end.status, end.signal, end.why]

    def kill(self) -> list[Any]:
        self.zygote.kill(self.pid, PATIENCE_S)
        return self.wait()

    def end(self) -> list[Any]:
        with self.couriers[self.pid].makefile("w") as lines:
            lines.write('["end"]\n')
        return self.wait()

    def ask(self, timeout_s: float = PATIENCE_S) -> dict[str, bool] | str:
        try:
            return self.zygote.ask(self.pid, timeout_s)
        except DeadlineExceeded as exceeded:
            return str(exceeded)

    def pids(self) -> list[int]:
        return [os.getpid(), self.zygote.process.pid, self.pid]

    def descriptors(self) -> list[int]:
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in self.pids()[:2]]

    def segments(self) -> list[str]:
        return sorted(path.name for path in Path("/dev/shm").glob("mpich_shm_*"))

    def fork_a_loader(self) -> int:
        """Fork a process that holds all that is open here, as data loaders do."""
        pid = os.fork()
        if pid == 0:
            hang()
        return pid


def main() -> None:
    host, port, token = sys.argv[1:]
    me = launched(os.environ)
    store = StoreClient((host, int(port)), token)
    trainer = Trainer(store, (host, int(port)), token, me.rank)
    for number in range(1000):
        command, *values = json.loads(store.get(f"do/{me.rank}/{number}", 3 * PATIENCE_S))
        if command == "stop":
            for courier in trainer.couriers.values():
                courier.close()
            trainer.zygote.stop(*values or [PATIENCE_S])
            store.put(f"done/{me.rank}/{number}", "null", PATIENCE_S)
            break
        result = getattr(trainer, command)(*values)
        store.put(f"done/{me.rank}/{number}", json.dumps(result), PATIENCE_S)
    store.close()


if __name__ == "__main__":
    main()
