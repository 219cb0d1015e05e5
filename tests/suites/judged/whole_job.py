"""Start a training as ckpt-chaos would; when that kills a process of it, end the rest of the job as a fault would.

Usage: python whole_job.py OUT ARMED MEMORY [ARGUMENT ...]

`warm` forks the training, and calls it with OUT, where it writes, and the arguments. ARMED: "trainer", in which
ckpt-chaos arms itself as always, or "courier", in which `armed_courier` does that. MEMORY: "kept", or "lost" at each
end, with all processes. A killed trainer ends alone, unless its memory is lost; with a killed courier all end.

OUT is the working directory of the training, so that ckpt-chaos sees the files in memory, too, which mlflash opens by
names relative to their directory.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import sys
from pathlib import Path

from processes import runs, send, with_variable
from waiting import until

HERE, SUPPORT = Path(__file__).parent, Path(__file__).parents[2] / "support"


def main(out: str, armed: str, memory: str, *arguments: str) -> int:
    beside = Path(out).with_name("memory")
    beside.mkdir(exist_ok=True)
    fifo = beside.with_name(f"courier-{os.getpid()}")
    os.mkfifo(fifo)
    courier = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)  # hangs up when the courier that has it open is dead
    environment = os.environ | {"MLFLASH_MEMORY": str(beside), "MLFLASH_JOB": "judged", "JUDGED": f"{beside}/"}
    if armed == "courier":
        environment["PYTHONPATH"] = os.pathsep.join([str(SUPPORT), str(HERE), environment.get("PYTHONPATH", "")])
        environment |= {"MLFLASH_TEST_ARMS": "armed_courier", "JUDGED_COURIER": str(fifo)}
    with socket.socket(socket.AF_UNIX) as warm:
        warm.connect(os.environ["JUDGED_WARM"])
        said = json.dumps([[out, *arguments], environment, armed == "trainer"]).encode()
        socket.send_fds(warm, [said], [1, 2])
        lines = warm.makefile()
        trainer = int(lines.readline())
        poll = select.poll()
        poll.register(warm, select.POLLIN)
        poll.register(courier, 0)
        while all(fd == courier for fd, _ in poll.poll()):
            if _was_reached():
                _end_all(beside, trainer)
            poll.unregister(courier)  # it has ended by itself, or has just been killed
        status = int(lines.readline())
    if memory == "lost":
        _end_all(beside)
        shutil.rmtree(beside)
    fifo.unlink()
    return status if status >= 0 else 128 - status


def _was_reached() -> bool:
    """Whether ckpt-chaos has killed where it was told to."""
    log, point = os.environ.get("CKPT_CHAOS_LOG"), os.environ.get("CKPT_CHAOS_CRASH_AT")
    if log is None or point is None:
        return False
    return any(line.split("\t")[0] == point for line in Path(f"{log}.rank0").read_text().splitlines())


def _end_all(beside: Path, *others: int) -> None:
    all_of_job = with_variable(f"\0JUDGED={beside}/\0") | {*others}
    send(signal.SIGKILL, all_of_job)
    until(lambda: not any(map(runs, all_of_job)), "the end of the job")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
