"""A trainer for tests of programs and of cluster: starts its couriers, and never touches MPI.

``launch_trainer.py OPTIONS`` with OPTIONS in JSON. What it knows it writes into ``FOLDER/RANK``, a JSON file that is
there whole or not at all.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from processes import started_by
from waiting import PATIENCE_S, hang, until

from mlflash.errors import DeadlineExceeded, MlflashError
from mlflash.launch.agent_client import HubLost
from mlflash.launch.courier_mpi import named_after
from mlflash.launch.couriers import Couriers, RunningCourier

options: dict[str, Any] = json.loads(sys.argv[1])
FOLDER = Path(options["folder"])


def say(rank: int, **known: Any) -> None:
    new = FOLDER / f".{rank}-{os.getpid()}"
    new.write_text(json.dumps(known))
    new.rename(FOLDER / str(rank))


def ask(courier: RunningCourier, *command: Any) -> Any:
    courier.channel.settimeout(PATIENCE_S)
    with courier.channel.makefile("rw") as lines:
        lines.write(json.dumps(command) + "\n")
        lines.flush()
        return json.loads(lines.readline() or "null")


def may_leave(courier: RunningCourier) -> set[str]:
    """The shared memory that MPI makes for this epoch, whether or not this courier came so far."""
    nodes = courier.nodes if len(courier.nodes) > 1 else ()
    return {name for node in nodes for name in named_after(courier.epoch, node)}


def start(entry: str = "serve", **more: Any) -> Couriers:
    directory = Path(options["directory"]) if "directory" in options else None
    couriers = Couriers(f"wireup_courier:{entry}", os.environ, PATIENCE_S, directory=directory, **more)
    couriers.next_epoch(PATIENCE_S)
    return couriers


def epochs() -> None:
    """One epoch after the other, each with an allreduce; every rank's courier is killed in between."""
    with open(FOLDER / f"output-{os.getpid()}", "w") as output:
        couriers = start(output=output)
    took, begun = list[float](), time.monotonic()
    expected = [couriers.rank, couriers.size, sum(range(1, couriers.size + 1))]
    for number in range(1, options["epochs"] + 1):
        courier = couriers.courier
        couriers.wait_up(PATIENCE_S)
        assert ask(courier, "sum", couriers.rank + 1) == expected
        if number > 1:
            took.append(time.monotonic() - begun)
        assert courier.number == number and len(courier.nodes) == couriers.size
        begun = time.monotonic()
        if number < options["epochs"]:
            os.kill(courier.pid, signal.SIGKILL)
            couriers.next_epoch(PATIENCE_S)
    ask(courier, "end")
    ended = couriers.wait_end(PATIENCE_S)
    assert ended is not None
    couriers.close()
    couriers.close()
    say(couriers.rank, launcher=couriers._meeting.me.launcher, took=took, status=ended.status,
        modules=sorted(sys.modules), nodes=courier.nodes)  # fmt: skip


def late() -> None:
    """Rank 1 comes to the second epoch only when the others have given up once."""
    couriers = start()
    segments = may_leave(couriers.courier)
    if couriers.rank != 1:
        try:
            couriers.next_epoch(3.0)  # until the agent has killed the last courier, and the hub has heard both
        except MlflashError as error:
            say(couriers.rank, error=str(error), ranks=error.ranks)
    else:
        until(lambda: all((FOLDER / str(rank)).exists() for rank in (0, 2)), "the others have given up")
    couriers.next_epoch(PATIENCE_S)
    couriers.wait_up(PATIENCE_S)
    total = ask(couriers.courier, "sum", 1)[2]
    segments |= may_leave(couriers.courier)
    ask(couriers.courier, "end")
    assert couriers.wait_end(PATIENCE_S) is not None
    couriers.close()
    (FOLDER / f"total-{couriers.rank}").write_text(json.dumps([total, sorted(segments)]))


def alone_in_init() -> None:
    """Rank 0's courier waits in MPI_Init for one that never calls it."""
    couriers = start("serve" if os.environ["RANK"] == "0" else "before_mpi")
    until(lambda: begin_soon(couriers), "both ranks to come within a short deadline, which is the courier's, too")
    try:
        couriers.wait_up(0.1)
    except MlflashError as error:
        say(couriers.rank, error=str(error), pids=[couriers.agent.pid, couriers.courier.pid],
            epoch=couriers.courier.epoch)  # fmt: skip
    hang()


def begin_soon(couriers: Couriers) -> bool:
    try:
        couriers.next_epoch(0.5)
    except DeadlineExceeded:
        return False
    return True


def fails() -> None:
    try:
        start()
    except (MlflashError, HubLost) as error:
        rank = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "0"))
        say(rank, error=str(error), ranks=getattr(error, "ranks", None), kind=type(error).__name__,
            children=sorted(started_by({os.getpid()})))  # fmt: skip


if __name__ == "__main__":
    globals()[options["do"]]()
