"""Processes that do not end or cannot be started, looks that fail, words nobody understands: `mlflash run` goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlflash.run import processes, supervisor
from mlflash.run.processes import ask_within
from mlflash.run.started_ranks import RunLog, StartedRanks
from mlflash.run.supervisor import RunOptions

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
    processes.end_session(unkillable, 0.1)
    processes.end_session(unkillable, 0.1)  # once more, as at the end of the job
    assert f"process {unkillable.pid} (python" in caplog.text, caplog.text
    assert "in state" in caplog.text and "is left behind" in caplog.text and unkillable.poll() is None


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


SOUND: dict[str, Any] = {"free": 1, "memory_error": "", "gpus": 0, "gpu_error": "", "interface": None,
                         "heartbeats": [], "steps": []}  # fmt: skip


class Step(StartedRanks):
    def __init__(self, process: subprocess.Popen[bytes]):
        self._process, self._began_on, self.lost, self._causes = process, ("a",), {}, []

    def poll(self) -> int | None:
        return self._process.poll()

    def end(self, wait_s: float = 0.0) -> None:
        processes.end_session(self._process)


class Nodes:
    """One node, and what it says: each time the next thing, and at the end the last one again. It is a system, too."""

    def __init__(self, *said: Callable[[], Any]):
        self._said, self.looks, self.system, self.hosts = list(said), 0, self, ["a"]
        self.process: subprocess.Popen[bytes] | None = None

    def gone(self, hosts: list[str]) -> dict[str, str]:
        return {}

    unwanted = gone

    def start(self, hosts: Sequence[str], ranks_per_node: int, argv: Sequence[str], env: Mapping[str, str]) -> Step:
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)
        return Step(self.process)

    def ask(self, hosts: list[str], what: str, timeout_s: float, behind_s: float, **fields: Any) -> dict[str, Any]:
        said = self._said.pop(0) if len(self._said) > 1 else self._said[0]
        self.looks += 1
        return {"a": said()}


def fail() -> None:
    raise RuntimeError("the cable")


def test_a_run_goes_on_whatever_looks_at_its_nodes_come_to_and_says_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(supervisor, "GONE_S", 0.0)

    def end() -> dict[str, Any]:
        assert nodes.process is not None and nodes.process.stdin is not None
        nodes.process.stdin.close()
        return SOUND

    nodes = Nodes(
        lambda: SOUND,
        fail,
        list,
        lambda: SOUND | {"heartbeats": [{"version": "9.9"}]},
        lambda: {"version": "8.8"},
        lambda: SOUND | {"unread": ["pulse-0000 cannot be read"]},
        end,
    )
    options = RunOptions(["cat"], 1, 1, 0, 0, "j", str(tmp_path), None, True, 0, 0.01, 0, 0, "")
    assert supervisor.Supervisor(nodes, options, RunLog(None), nodes.start).run() == 0  # type: ignore[arg-type]
    for text in ("be asked for their status: RuntimeError('the cable')", "status of a cannot be read: it is not what",
                 "cannot be read: written by version 9.9", "cannot be read: written by version 8.8",
                 "a: pulse-0000 cannot be read"):  # fmt: skip
        assert caplog.text.count(text) == 1, caplog.text
