"""Lost ranks of `mlflash run --keep-alive`, and `mlflash demo`, which shows one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import needs
import pytest
from kept_run import MLFLASH, TRAINER, uninterrupted
from processes import plain_environment, ran
from run_results import Results
from waiting import PATIENCE_S, until

from mlflash.courier import main

pytestmark = needs.MPI
LAST = 40
TRAIN = """
import os, pathlib, signal, sys
import numpy as np
import mlflash
from mlflash.channel import connection
from mlflash.launch.agent_client import AgentRefused
from mlflash.launch.couriers import Couriers

LAST, OUT = 30, pathlib.Path(sys.argv[1])
state = {"w": np.zeros(1000), "step": 0}


def lose_the_courier():
    def refuse(*_):
        raise AgentRefused("it cannot fork")

    Couriers.next_epoch = refuse
    os.kill(connection._connections[0].couriers.courier.pid, signal.SIGKILL)


def train(ckpt, step):
    rank = int(os.environ["RANK"])
    for step in range(step + 1, LAST + 1):
        if (rank, step) == (1, 5) and not (OUT / "doomed").exists():
            (OUT / "doomed").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL) if sys.argv[2] == "killed" else lose_the_courier()
        state["w"] += step
        state["step"] = step
        try:
            ckpt.save(step, state).wait()
        except mlflash.errors.SaveFailed:  # a courier is started anew
            pass
    while not ckpt.save(LAST + 1, state).wait().committed:
        pass
    return ckpt.steps()


steps = mlflash.keep_alive(train, state, timeout_s=30.0, redundancy="copy")
(OUT / f"end-{os.environ['RANK']}").write_text(f"{os.getpid()} {state['w'][0]:g} {steps[-1]}")
"""


def run(shm: Path, folder: Path, how: str) -> str:
    """Let a run lose rank 1 and come to its end; return what it printed."""
    script = folder / "train.py"
    script.write_text(TRAIN)
    options = ["-N", "1", "--ranks-per-node", "2", "--keep-alive", "--spares", "1", "--job", "kept"]
    words = ["run", *options, "--", "python", script, folder, how]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = ran(sys.executable, "-m", "mlflash", *words, cwd=folder, timeout=2 * PATIENCE_S, MLFLASH_MEMORY=shm,
               OMP_NUM_THREADS=1, PATH=path)  # fmt: skip
    ends = [(folder / f"end-{rank}").read_text().split() for rank in range(2)]
    assert [end[1:] for end in ends] == [["465", "31"]] * 2
    assert ends[1][0] != (folder / "doomed").read_text()
    return done.stderr


def test_a_rank_whose_couriers_cannot_be_started_is_replaced(shm: Path, tmp_path: Path) -> None:
    said = run(shm, tmp_path, "cannot start couriers")
    assert "This process ends, and another one takes rank 1" in said
    assert re.search(r"rank 1 was lost \(.*\); all train on after step", said)


def test_a_killed_rank_is_replaced_before_its_old_courier_ends(shm: Path, tmp_path: Path) -> None:
    said = run(shm, tmp_path, "killed")
    (seconds,) = re.findall(r"rank 1 was lost \(.* signal 9 .*\); all train on after step \d+, ([\d.]+) s later", said)
    assert float(seconds) < main.ORPHAN_S


def test_a_loss_while_the_shards_of_another_one_are_not_made_yet(shm: Path, tmp_path: Path) -> None:
    out, options = tmp_path / "out", {"kind": "fsdp", "die": [[1, 20, "forward"]], "die_in": [[1, "round.couriers"]]}
    results = Results(out)
    words = ["-N", 1, "--ranks-per-node", 3, "--min-ranks", 1, "--keep-alive", "--launcher", "ssh", "--job", "kept"]
    ran(MLFLASH, "run", *words, "--journal", out / "run.jsonl", "--", sys.executable, TRAINER, out, LAST,
        json.dumps(options), timeout=2 * PATIENCE_S, MLFLASH_MEMORY=shm, OMP_NUM_THREADS=1,
        PYTHONPATH=TRAINER.parent)  # fmt: skip
    (first, *_), moved = results.events("recovered"), results.events("moved")  # what was lost may come back in time
    assert first["ranks"] == 1 and len(results.events("start")) == 1  # rank 2 was rank 1 of two when it was lost
    ranks, begun = [3, *(event["ranks"] for event in (first, *moved))], [first["step"], *(e["step"] for e in moved)]
    parts = [*zip(ranks, [*begun, LAST], strict=True)]
    (tmp_path / "alone").mkdir()
    expected = uninterrupted(tmp_path / "alone", *parts, kind="fsdp")
    assert [end["digest"] for end in results.ends()[: ranks[-1]]] == expected, parts


# mlflash demo

pytestmark = pytest.mark.timeout(200)


def demo(shm: Path, tmp_path: Path, *options: str) -> subprocess.Popen[str]:
    environment = plain_environment(MLFLASH_MEMORY=shm, TMPDIR=tmp_path)
    return subprocess.Popen([Path(sys.executable).with_name("mlflash"), "demo", "--keep-alive", *options],
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)  # fmt: skip


def processes_of(folder: Path) -> list[str]:
    """Commands of processes that have this folder, or one in it, among their arguments."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            commands.append(path.read_text().replace("\0", " "))
    return [command for command in commands if str(folder) in command]


def test_another_process_takes_the_lost_rank_with_the_same_bits(shm: Path, tmp_path: Path) -> None:
    with demo(shm, tmp_path, "--steps", "40", "--kill-step", "6", "--seed", "1") as process:
        try:
            out, _ = process.communicate(timeout=170)
        finally:
            process.terminate()  # it ends all that it has started
    assert process.returncode == 0, out
    words = ("killed", "stayed", "replaced")
    rows = dict(line.split(maxsplit=1) for line in out.splitlines() if line.startswith(words))
    killed = re.fullmatch(r"rank ([01]) \(process (\d+)\) with SIGKILL in step (\d+)", rows["killed"])
    stayed = re.fullmatch(r"rank ([01]): process (\d+), the same as before", rows["stayed"])
    replaced = re.fullmatch(r"rank ([01]) by process (\d+), which had waited", rows["replaced"])
    assert killed and stayed and replaced, out
    assert int(killed[1]) == int(replaced[1]) == 1 - int(stayed[1]) and int(killed[3]) >= 6
    assert len({killed[2], stayed[2], replaced[2]}) == 3
    assert "final weights are bit-identical to an uninterrupted run" in out
    assert not list(tmp_path.glob("mlflash-demo-*")) and not list(shm.glob("demo-*"))
    assert not processes_of(tmp_path)


def test_where_it_is_ended_nothing_of_it_goes_on(shm: Path, tmp_path: Path) -> None:
    with demo(shm, tmp_path, "--steps", "100000") as process:
        try:
            logs = "mlflash-demo-*/uninterrupted/rank*.jsonl"
            until(lambda: len([log for log in tmp_path.glob(logs) if log.stat().st_size]) == 2, "ranks that train")
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=60)
        finally:
            process.terminate()  # it ends all that it has started
    assert process.returncode == 128 + signal.SIGTERM, out
    until(lambda: not processes_of(tmp_path), lambda: f"their end: {processes_of(tmp_path)}", 60)
    assert not list(shm.glob("demo-*"))


def test_the_demo_shows_three_ranks_that_train_on_and_the_fourth_that_comes_back(shm: Path, tmp_path: Path) -> None:
    with demo(shm, tmp_path, "--elastic") as process:
        output, _ = process.communicate(timeout=110)
    assert process.returncode == 0, output
    four, three, again = (
        line.split(": processes ")[1].split(", ") for line in output.splitlines() if "ranks: p" in line
    )
    assert [four[0], four[1], four[3]] == three == again[:3] and again[3] not in four
    assert not list(tmp_path.glob("mlflash-demo-*")) and not list(shm.glob("mlflash-demo-*"))
