"""mlflash demo: what it shows is so, and it leaves nothing behind."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import plain_environment
from waiting import until

pytestmark = pytest.mark.timeout(200)


def demo(shm: Path, tmp_path: Path, *options: str) -> subprocess.Popen[str]:
    environment = plain_environment(MLFLASH_MEMORY=shm, TMPDIR=tmp_path)
    return subprocess.Popen([Path(sys.executable).with_name("mlflash"), "demo", "--keep-alive", *options],
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)  # fmt: skip


def its_processes(folder: Path) -> list[str]:
    """Commands of processes that have this folder, or one in it, among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text()
        except OSError:  # it ended meanwhile
            continue
        found += [words.replace("\0", " ")] if str(folder) in words else []
    return found


def test_one_process_stays_another_takes_the_lost_rank_and_the_bits_are_the_same(shm: Path, tmp_path: Path) -> None:
    with demo(shm, tmp_path, "--steps", "40", "--kill-step", "6", "--seed", "1") as process:
        try:
            out, _ = process.communicate(timeout=170)
        finally:
            process.terminate()  # it ends all that it has started
    assert process.returncode == 0, out
    rows = dict(
        line.split(maxsplit=1) for line in out.splitlines() if line.startswith(("killed", "stayed", "replaced"))
    )
    killed = re.fullmatch(r"rank ([01]) \(process (\d+)\) with SIGKILL in step (\d+)", rows["killed"])
    stayed = re.fullmatch(r"rank ([01]): process (\d+), the same as before", rows["stayed"])
    replaced = re.fullmatch(r"rank ([01]) by process (\d+), which had waited", rows["replaced"])
    assert killed and stayed and replaced, out
    assert int(killed[1]) == int(replaced[1]) == 1 - int(stayed[1]) and int(killed[3]) >= 6
    assert len({killed[2], stayed[2], replaced[2]}) == 3
    assert "final weights are bit-identical to an uninterrupted run" in out
    assert not list(tmp_path.glob("mlflash-demo-*")) and not list(shm.glob("demo-*"))
    assert not its_processes(tmp_path)


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
    until(lambda: not its_processes(tmp_path), lambda: f"their end: {its_processes(tmp_path)}", 60)
    assert not list(shm.glob("demo-*"))
