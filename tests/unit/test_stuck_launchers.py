"""Processes that do not end or cannot be started, looks that fail, words nobody understands: `mlflash run` goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from mlflash.launcher import node_watch, processes, supervisor
from mlflash.launcher.launch_system import RunLog, RunOptions, Step
from mlflash.launcher.node_watch import Beside, Looks
from mlflash.launcher.processes import ask_within

END_S = 60
TRACEE = """
import ctypes, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ctypes.CDLL(None).prctl(0x59616D61, -1, 0, 0, 0)  # PR_SET_PTRACER, anybody
print(flush=True)
signal.pause()
"""
# A process that is traced has not ended for its parent before its tracer has seen the end, whatever signal it got.
TRACER = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
print(libc.ptrace(0x4206, int(sys.argv[1]), None, None), flush=True)  # PTRACE_SEIZE
sys.stdin.read()
"""


@pytest.fixture
def unkillable(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    monkeypatch.setattr(processes, "KILL_WAIT_S", 0.2)
    process = subprocess.Popen([sys.executable, "-S", "-c", TRACEE], stdout=subprocess.PIPE, start_new_session=True)
    with (
        process,
        subprocess.Popen(
            [sys.executable, "-S", "-c", TRACER, str(process.pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as tracer,
    ):
        assert process.stdout is not None and tracer.stdin is not None and tracer.stdout is not None
        try:
            process.stdout.readline()
            if tracer.stdout.readline() != b"0\n":
                pytest.skip("no process may be traced here")
            yield process
        finally:
            tracer.kill()
            process.kill()


def test_a_launcher_that_sigkill_does_not_end_is_named_and_left_behind(
    unkillable: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    step = Step(unkillable)
    step.end(0.1)
    step.end(0.1)  # once more, as at the end of the job
    assert f"process {unkillable.pid} (python" in caplog.text, caplog.text
    assert "in state" in caplog.text and "is left behind" in caplog.text and step.poll() is None


def test_what_is_asked_ends_with_an_interrupt(tmp_path: Path) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    # More than a pipe takes: it is through when what it printed is being read.
    program = f"echo $$ > {tmp_path}/pid; head -c 1000000 /dev/zero; kill -USR1 $PPID; exec sleep 1000"
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            ask_within(["sh", "-c", program], END_S)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


SOUND: dict[str, Any] = {"free": 1, "gpus": 0, "gpu_error": "", "interface": None, "heartbeats": [], "steps": []}


class Nodes:
    """A launcher of one node, and what it says: each time the next thing, and at the end the last one again."""

    def __init__(self, *said: Callable[[], str]):
        self._said, self.looks = list(said), 0
        self.process: subprocess.Popen[bytes] | None = None

    def hosts(self) -> list[str]:
        return ["a"]

    def gone(self, hosts: list[str]) -> dict[str, str]:
        return {}

    unwanted = gone

    def start(self, seats: Any, argv: list[str], env: dict[str, str]) -> Step:
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)
        return Step(self.process)

    def on_each(self, hosts: list[str], argv: list[str], timeout_s: float, behind_s: float) -> dict[str, str]:
        said = self._said.pop(0) if len(self._said) > 1 else self._said[0]
        self.looks += 1
        return {"a": said()}


def fail() -> str:
    raise RuntimeError("the cable")


def test_a_run_goes_on_whatever_looks_at_its_nodes_come_to_and_says_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(supervisor, "GONE_S", 0.0)

    def end() -> str:
        assert nodes.process is not None and nodes.process.stdin is not None
        nodes.process.stdin.close()
        return json.dumps(SOUND)

    nodes = Nodes(
        lambda: json.dumps(SOUND),
        fail,
        lambda: "[" * 100_000,
        lambda: "[]",
        lambda: json.dumps(SOUND | {"heartbeats": [{"version": "9.9"}]}),
        lambda: json.dumps({"version": "8.8"}),
        lambda: json.dumps(SOUND | {"unread": ["pulse-0000 cannot be read"]}),
        end,
    )
    options = RunOptions(["cat"], 1, 1, 0, 0, "j", str(tmp_path), None, True, 0, 0.01, 0, 0, "")
    assert supervisor.Supervisor(nodes, options, RunLog(None)).run() == 0  # type: ignore[arg-type]
    for text in ("be asked for their status: RuntimeError('the cable')", "status of a cannot be read: it is not what",
                 "cannot be read: written by version 9.9", "cannot be read: written by version 8.8",
                 "a: pulse-0000 cannot be read"):  # fmt: skip
        assert caplog.text.count(text) == 1, caplog.text


def test_a_look_that_does_not_end_is_told_of_and_keeps_nothing_from_ending(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_watch, "_STUCK_S", 0.0)
    over = threading.Event()
    nodes = Nodes(lambda: str(over.wait(END_S)))
    look = Beside(Looks(nodes, "/dev/shm", "j", 0, ""), ["a"])  # type: ignore[arg-type]
    try:
        until(lambda: not look.done() and "has not ended" in caplog.text, "a warning", END_S)
        assert not look.done() and caplog.text.count("has not ended") == 1
        (thread,) = (thread for thread in threading.enumerate() if thread.name == "mlflash-look")
        assert thread.daemon
    finally:
        over.set()
    until(look.done, "the end of the look", END_S)
