"""The smallest exchange that starves: one Rput each way, and a second thread that tests it, sleeps, and tests again."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from pathlib import Path

import numpy as np
from computing import Computing
from exchange import mapped
from leaving import leave
from mpi4py import MPI

PAGE_NBYTES = 4096
MARK = 7


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("memory", type=Path)
    parser.add_argument("nbytes", type=int)
    parser.add_argument("deadline_s", type=float)
    parser.add_argument("main")
    parser.add_argument("window", choices=("create", "allocate", "none"), help="none means Isend and Irecv")
    parser.add_argument("push", help="number of Iprobes before each sleep, or lock")
    parser.add_argument("nap_s", type=float)
    parser.add_argument("switch_s", type=float, help="how long a thread may hold the interpreter; 0: the default")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.switch_s:
        sys.setswitchinterval(args.switch_s)
    comm = MPI.COMM_WORLD
    source = np.full(args.nbytes, MARK, np.uint8)
    if args.window == "allocate":
        window = MPI.Win.Allocate(args.nbytes, 1, comm=comm)
        inbox = np.asarray(window.tomemory(), dtype=np.uint8)
        inbox[:] = 0
    else:
        inbox = mapped(args.memory, args.nbytes)
        window = MPI.Win.Create(inbox, 1, comm=comm)
    window.Lock_all(MPI.MODE_NOCHECK)
    own = MPI.Win.Allocate(8, 1, comm=MPI.COMM_SELF)
    peer, polls, done = 1 - comm.rank, [0], threading.Event()

    def wait(request: MPI.Request) -> None:
        while not request.Test():
            polls[0] += 1
            if args.push == "lock":
                own.Lock(0)
                own.Unlock(0)
            else:
                for _ in range(int(args.push)):
                    comm.Iprobe(MPI.ANY_SOURCE, 9)
            if args.nap_s:
                time.sleep(args.nap_s)

    def courier() -> None:
        if args.window == "none":
            arriving = comm.Irecv([inbox, MPI.BYTE], peer, 1)
            wait(comm.Isend([source, MPI.BYTE], peer, 1))
            wait(arriving)
        else:
            wait(window.Rput([source, MPI.BYTE], peer, [0, args.nbytes, MPI.BYTE]))
        wait(comm.Ibarrier())  # the Rput of the other rank has left too
        done.set()

    comm.Barrier()
    start = time.monotonic()
    threading.Thread(target=courier, daemon=True).start()
    Computing(args.main).until(done, args.deadline_s)
    seconds = time.monotonic() - start
    arrived = int((inbox.reshape(-1, PAGE_NBYTES)[:, -1] == MARK).sum()) * PAGE_NBYTES
    if comm.rank == 0:
        with args.out.open("a") as file:
            line = {"seconds": seconds, "never": not done.is_set(), "polls": polls[0], "arrived": arrived}
            file.write(json.dumps(line) + "\n")
    if not done.is_set():
        leave()
    window.Unlock_all()
    window.Free()
    own.Free()


if __name__ == "__main__":
    main()
