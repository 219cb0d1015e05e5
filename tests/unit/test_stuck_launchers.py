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

from mlflash.errors import LaunchFailed
from mlflash.launcher import first_node_guard, node_watch, processes, supervisor
from mlflash.launcher.launch_system import RunLog, RunOptions, Step
from mlflash.launcher.node_watch import Beside, Looks
from mlflash.launcher.on_hosts import OnHosts
from mlflash.launcher.on_slurm import OnSlurm
from mlflash.launcher.processes import ask_within, end_session, spawn

END_S = 60
TRACEE = """
import ctypes, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ctypes.CDLL(None).prctl(0x59616D61, -1, 0, 0, 0)  # PR_SET_PTRACER, anybody
print(flush=True)
signal.pause()
"""
TIDY = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print(flush=True)
signal.sigwait({signal.SIGTERM})
raise SystemExit(3)
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


def test_what_takes_too_long_is_killed_and_what_is_not_there_has_a_name(tmp_path: Path) -> None:
    assert ask_within(["sh", "-c", r"printf '\377'; exit 3"], END_S).stdout == "\N{REPLACEMENT CHARACTER}"
    with pytest.raises(LaunchFailed, match=r"sh took longer than 0\.1 s"):
        ask_within(["sh", "-c", "sleep 1000"], 0.1)
    for start in (lambda: spawn([str(tmp_path / "gone")]), lambda: OnHosts(["a"], str(tmp_path / "gone")).on_each(
        ["a"], ["true"], END_S
    )):  # fmt: skip
        with pytest.raises(LaunchFailed, match="gone cannot be started: No such file"):
            start()


def test_what_has_time_to_end_tidies_up_and_what_is_asked_ends_with_an_interrupt(tmp_path: Path) -> None:
    process = spawn([sys.executable, "-S", "-c", TIDY], stdout=subprocess.PIPE)
    with process:
        process.stdout.readline()
        end_session(process, END_S)
        end_session(process, END_S)  # once more, as at the end of a launch
    assert process.returncode == 3

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


def test_a_node_that_prints_what_is_no_text_does_not_silence_the_others(tmp_path: Path) -> None:
    shell = tmp_path / "shell"
    shell.write_text("#!/bin/sh\n[ \"$1\" != bad ] || printf '\\377'\necho well\n")
    shell.chmod(0o700)
    told = OnHosts(["bad", "b"], str(shell)).on_each(["bad", "b"], ["true"], END_S)
    assert told == {"b": "well\n", "bad": "\N{REPLACEMENT CHARACTER}well\n"}


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


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str], None]:
    """Makes a program of Slurm, for a guard of node a."""

    def make(name: str, text: str) -> None:
        (tmp_path / f"{name}.new").write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / f"{name}.new").chmod(0o700)
        (tmp_path / f"{name}.new").rename(tmp_path / name)

    monkeypatch.setattr(first_node_guard, "_BEAT_S", 0.05)
    for name, value in (("PATH", str(tmp_path)), ("SLURMD_NODENAME", "a"), ("SLURM_JOB_NODELIST", "a,b")):
        monkeypatch.setenv(name, value)
    make("scontrol", "printf 'a\\nb\\n'")
    return make


def test_a_guard_that_cannot_be_started_is_told_of_and_started_as_soon_as_it_can_be(
    program: Callable[[str, str], None], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    options = RunOptions(["true"], 1, 1, 0, 0, "j", str(tmp_path), None, True, 0, 1, 0, 0, "")
    with first_node_guard.Guard(OnSlurm("1"), options, None):
        until(lambda: "guard of the first node" in caplog.text, "a warning", END_S)
        program("srun", f"exec /bin/cat > {tmp_path}/heard")
        until(lambda: (tmp_path / "heard").exists() and (tmp_path / "heard").read_bytes(), "a beat", END_S)
    assert (tmp_path / "heard").read_bytes().endswith(b"bye\n") and caplog.text.count("guard of the first node") == 1


def test_why_a_guard_ended_is_said_once(
    program: Callable[[str, str], None], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    program("srun", f"echo x >> {tmp_path}/starts; echo 'srun: error: b: Connection refused' >&2; exit 1")
    options = RunOptions(["true"], 1, 1, 0, 0, "j", str(tmp_path), None, True, 0, 1, 0, 0, "")
    with first_node_guard.Guard(OnSlurm("1"), options, None):
        until(lambda: (tmp_path / "starts").exists() and (tmp_path / "starts").stat().st_size > 6, "starts", END_S)
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.endswith("ended, and is started again: srun: error: b: Connection refused")
