"""A process that was forked from a training: nothing of the parent's Checkpointer is ended or written by it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

from processes import plain_environment

PROGRAM = """
import json, logging, multiprocessing, os, signal, sys
import numpy as np
import mlflash
from mlflash.errors import Closed, DeadlineExceeded

port = sys.argv[1]
state = {"a": np.ones(1000)}

def is_refused(call):
    try:
        call()
    except (Closed, DeadlineExceeded) as error:
        return "was forked" in str(error)
    return False

def listeners():
    rows = [line.split() for line in open("/proc/net/tcp").readlines()[1:]]
    wanted = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == int(port)}
    return wanted & {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                     if os.path.islink(f"/proc/self/fd/{fd}")}

def be_a_child(ckpt, snapshot):
    calls = [lambda: ckpt.save(9, state), lambda: ckpt.restore(state), ckpt.load, ckpt.steps, ckpt.wait, ckpt.drain,
             lambda: ckpt.adapting.seen_by_first(int), snapshot.wait]
    refused = [is_refused(call) for call in calls]
    assert all(refused), refused
    assert not listeners(), "a port that the parent may close"
    logging.getLogger("mlflash").warning("said by a child")
    ckpt.close()

pid = 0
with mlflash.Checkpointer("d", redundancy="none", log="log", metrics=f":{port}", drain_every=1, timeout_s=60) as ckpt:
    pulse = f"{ckpt.report()['memory']}/pulse-0000"
    assert listeners()
    ckpt.prepare(state)
    stop = lambda point: os.kill(ckpt._courier._connection.pid, signal.SIGSTOP) if point == "stage.begun" else None
    mlflash.crash_points.arm(stop)
    snapshot = ckpt.save(1, state)
    mlflash.crash_points.arm(None)
    before = open(pulse).read()
    for how in ("leaves", "exits", "raises"):
        if pid := os.fork():
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == (how == "raises"), how
        else:
            be_a_child(ckpt, snapshot)
            if how == "exits":
                sys.exit(0)
            if how == "raises":
                raise RuntimeError("of the child")
            break
    if pid:
        child = multiprocessing.get_context("fork").Process(target=be_a_child, args=(ckpt, snapshot))
        child.start()
        child.join(60)
        assert child.exitcode == 0
        assert (now := open(pulse).read()) == before, (now.strip(), before.strip())
        os.kill(ckpt._courier._connection.pid, signal.SIGCONT)
        assert snapshot.wait().committed and ckpt.save(2, state).wait().committed and ckpt.drain().wait().step == 2
if not pid:
    os._exit(0)
print(json.loads(open(pulse).read(4096))["state"], ckpt.report()["counts"]["committed"])
"""


def test_a_forked_child_neither_ends_nor_writes_nor_serves_anything_of_its_parent(shm: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    done = subprocess.run([sys.executable, "-c", PROGRAM, port], env=plain_environment(MLFLASH_MEMORY=shm),
                          cwd=shm, timeout=100, capture_output=True, text=True, check=False)  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "ended 2\n"), done.stderr
    events = [json.loads(line) for line in (shm / "log").read_text().splitlines()]
    assert [event["event"] for event in events if event["event"] in ("start", "end")] == ["start", "end"]
    assert [event["step"] for event in events if event["event"] == "commit"] == [1, 2]
    assert "said by a child" in done.stderr and not any("said by a child" in str(event) for event in events)
    assert sum(path.name.startswith("step-") for path in (shm / "d").iterdir()) == 2, "drained by the parent"
