"""Processes that stay when others are lost: real agents and a shell, and programs that take the ranks of each other."""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from introduced import introduce
from processes import described, killed_in_the_end, left_here, started_by
from unit.kept_job import RANK, SHELL, Said, all_gone, code_of, is_gone, parent
from waiting import until

from mlflash.launch.lines import pack
from mlflash.run.agents import Agents
from mlflash.run.launch_systems import OnSsh
from mlflash.run.membership import Deadlines
from mlflash.run.started_ranks import KeepAlive, KeptRanks, RunLog, start_kept

LATER_S = 60.0  # without a sign of life; where nothing is to be lost for that, on a busy machine
SUPERVISOR = """
import sys, threading
from mlflash.run.agents import Agents
from mlflash.run.started_ranks import RunLog
from mlflash.run.membership import Deadlines
from mlflash.run.launch_systems import OnSsh
from mlflash.run.started_ranks import KeepAlive, start_kept
with Agents(OnSsh(["a", "b"], {shell!r}), 2.0) as agents:
    argv = [sys.executable, "-c", {program!r}, {folder!r}]
    start_kept(agents, KeepAlive(0, Deadlines(2.0)), RunLog(None), ["a"], 2, argv, {{}})
    threading.Event().wait()
"""
Start = Callable[..., KeptRanks]


def mine() -> set[str]:
    """What this process has of descriptors, and of threads of ours."""
    threads = {f"thread {one.name}" for one in threading.enumerate() if one.name.startswith("mlflash-")}
    return threads | {f"descriptor {fd}" for fd in os.listdir("/proc/self/fd")}


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / "ssh"
    path.write_text(SHELL.format(folder=tmp_path))
    path.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    return str(path)


@pytest.fixture
def start(tmp_path: Path, shell: str) -> Iterator[Start]:
    """Starts a program on hosts, of which some have ranks; nothing of it is left in the end."""
    before, started, opened = mine(), list[KeptRanks](), list[Agents]()
    seen: set[int] = set()

    def begin(hosts: str, spare_hosts: str = "", per_node: int = 1, spares: int = 0, lost_s: float = LATER_S,
              program: str = RANK) -> KeptRanks:  # fmt: skip
        names = [*hosts.split(","), *filter(None, spare_hosts.split(","))]
        opened.append(Agents(OnSsh(names, shell), lost_s).__enter__())
        run_log, argv = RunLog(tmp_path / "run.jsonl"), [sys.executable, "-c", program, str(tmp_path)]
        started.append(
            start_kept(opened[-1], KeepAlive(spares, Deadlines(lost_s)), run_log, hosts.split(","), per_node, argv, {})
        )
        Said(tmp_path).seats(1)
        seen.update(started_by({os.getpid()}))
        membership = started[-1].membership
        until(lambda: membership._phase == "training", "all to have begun: who is lost before that is not replaced")
        return started[-1]

    yield begin
    seen |= started_by({os.getpid()}) | {pid for pid, _ in Said(tmp_path).lines()}
    for ranks in started:
        ranks.end(0)
        assert ranks.poll() is not None
    for agents in opened:
        agents.close()
    all_gone(*seen)
    until(lambda: not left_here(), lambda: f"the end of {sorted(map(described, left_here()))}")
    until(lambda: mine() <= before, lambda: f"the end of {mine() - before}")


def recovered(folder: Path) -> list[dict[str, object]]:
    path = folder / "run.jsonl"
    notes = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [note for note in notes if note["event"] == "recovered"]


def end_well(ranks: KeptRanks, folder: Path) -> None:
    (folder / "end").touch()
    assert code_of(ranks) == 0


@pytest.mark.parametrize("where", ["there", "elsewhere"])
def test_when_a_rank_is_killed_all_others_leave_and_a_spare_gets_its_rank(
    start: Start, tmp_path: Path, where: str, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = start("a,b", spares=2) if where == "there" else start("a,b", "c")
    said = Said(tmp_path)
    spare = "b#1" if where == "there" else "c#0"
    until(lambda: len(said.begun()) == (4 if where == "there" else 3), "the spares")
    first, second = said.seats(1)
    os.kill(second, signal.SIGKILL)
    assert said.seats(2) == [first, said.begun()[spare]]
    assert [pid for pid, _ in said.of("heard")] == [pid for pid, _ in said.of("left")] == [first]
    until(lambda: "b#0.1" in said.begun(), "a fresh process in its place")
    note = until(lambda: recovered(tmp_path), "the note of it")[0]
    assert [note[what] for what in ("round", "lost", "step", "times")] == [2, [1], 2, {"all": 1.0}]
    printed: list[str] = []
    told = "rank 1 was lost (its process was killed by signal 9 ["
    assert note["cause"]["kind"] == "killed" and note["cause"]["rank"] == 1 and note["cause"]["host"] == "b"
    until(lambda: printed.append(capfd.readouterr().err) or told in "".join(printed), "what is printed")  # type: ignore[func-returns-value]
    end_well(ranks, tmp_path)


def test_the_same_error_in_two_rounds_after_the_same_step_is_the_end(
    tmp_path: Path, shell: str, capfd: pytest.CaptureFixture[str]
) -> None:
    trains = """
            link.say({"trains": number, "step": 7, "times": {"all": 1.0}, "unit": 1})
            say("trains", number, seat.rank)
            while seat.rank == 1:
                if f" trains {number} 0\\n" in open(folder + "/said").read():
                    raise ValueError(f"bad batch of {os.getpid()}")
"""
    (line,) = [line for line in RANK.splitlines(keepends=True) if '"trains": number' in line]
    program = RANK.replace(line, trains)
    with Agents(OnSsh(["a"], shell), LATER_S) as agents:
        argv = [sys.executable, "-c", program, str(tmp_path)]
        options = KeepAlive(2, Deadlines(LATER_S))
        ranks = start_kept(agents, options, RunLog(tmp_path / "run.jsonl"), ["a"], 2, argv, {})
        assert code_of(ranks) == 1 and ranks.is_repeated
    cause = ranks.cause
    assert cause is not None and (cause.kind, cause.rank, cause.host) == ("error", 1, "a")
    assert cause.text.startswith("ValueError: bad batch of ") and cause.evidence.startswith("<string>:")
    assert len(recovered(tmp_path)) == 1 and recovered(tmp_path)[0]["cause"]["kind"] == "error"
    assert "was lost, by the same error as before, after step 7 again" in capfd.readouterr().err


@pytest.mark.parametrize(
    "killed", ["agent", pytest.param("agent that is stopped", marks=pytest.mark.slow), "remote shell"]
)
def test_a_host_that_is_lost_is_lost_with_all_of_its_ranks(start: Start, tmp_path: Path, killed: str) -> None:
    host = "apart" if killed == "remote shell" else "b"
    ranks = start(f"a,{host}", "c", per_node=2, lost_s=6.0 if killed == "agent that is stopped" else LATER_S)
    said = Said(tmp_path)
    until(lambda: len(said.begun()) == 6, "the spares")
    before = said.seats(1)
    agent = parent(before[2])
    if killed == "agent":
        os.kill(agent, signal.SIGKILL)
    elif killed == "agent that is stopped":
        os.kill(agent, signal.SIGSTOP)
    else:
        os.killpg(int((tmp_path / "shell-apart").read_text()), signal.SIGKILL)
    assert said.seats(2)[:2] == before[:2]
    assert {*said.seats(2)[2:]} == {said.begun()["c#0"], said.begun()["c#1"]}
    all_gone(*before[2:], agent)
    note = until(lambda: recovered(tmp_path), "the note of it")[0]
    assert note["lost"] == [2, 3] and host in str(note["why"])
    assert ranks.hosts == ("a", "c")
    ranks._began_on = ("a", host, "more")
    assert ranks.hosts == ranks._began_on  # they are on fewer now
    assert len(said.begun()) == 6  # nothing is started there any more
    end_well(ranks, tmp_path)


def speak(address: tuple[str, int] | str, said: bytes, begin: Callable[[socket.socket], None] = lambda sock: None
          ) -> None:  # fmt: skip
    """Connect, begin, say something, and wait until the other end has no more of that."""
    with socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET) as sock:
        sock.settimeout(60.0)
        sock.connect(address)
        begin(sock)
        sock.sendall(said)
        try:
            while sock.recv(4096):
                pass
        except ConnectionResetError:  # there was more than it has read
            pass


def test_strangers_are_refused_and_harm_nobody(start: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ranks = start("a,b", "c")
    said = Said(tmp_path)
    until(lambda: len(said.begun()) == 3, "the spare")
    agents, token = ranks._agents.address, ranks._agents.token
    wrong = ({"token": token, "host": "b"}, {"nonce": None}, {"ended": "a#0", "code": 1}, [], 7, None, "token")
    for message in wrong:
        speak(agents, pack(message) + pack({"from": "b#0", "says": {"left": 1}}) + pack({"ended": "a#0", "code": 1}))
    for hello in ({"host": "a"}, {"host": "nobody"}, {}):
        speak(agents, pack({"from": "b#0", "says": {"left": 1}}), functools.partial(introduce, token=token, **hello))
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 99 + b"\n", b"{]\0\n", b"[" * 0xFFFF):
        speak(agents, garbage)
    (environment,) = (Path(f"/proc/{pid}/environ").read_bytes() for pid in [said.seats(1)[1]])
    (kept,) = (word for word in environment.split(b"\0") if word.startswith(b"MLFLASH_KEPT="))
    socket_of_b = "\0" + json.loads(kept.partition(b"=")[2])["socket"]
    for stranger in ({"name": "nobody"}, {"left": 1}, [], 7, "b#0"):
        speak(socket_of_b, pack(stranger) + pack({"left": 1, "unit": 1}))
    before = said.seats(1)
    (tmp_path / "odd").touch()
    until(lambda: len(said.of("odd")) == 2, "what both ranks say that nobody understands")
    until(lambda: "sent a message that cannot be read" in capfd.readouterr().err, "a word of that")
    assert not said.of("heard") and ranks.poll() is None
    os.kill(before[0], signal.SIGKILL)
    assert said.seats(2) == [said.begun()["c#0"], before[1]]
    end_well(ranks, tmp_path)


SILENT = """
import resource, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
silent = [socket.create_connection((sys.argv[1], int(sys.argv[2])), 60) for _ in range(1100)]
print("there", len(silent[0].recv(1)), flush=True)  # the service has come to them when the first one is closed
sys.stdin.read()
"""


def test_a_thousand_silent_connections_keep_no_rank_from_being_replaced(start: Start, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))
    try:
        ranks = start("a,b", "c")
        said = Said(tmp_path)
        until(lambda: len(said.begun()) == 3, "the spare")
        first, second = said.seats(1)
        words = [sys.executable, "-c", SILENT, *map(str, ranks._agents.address)]
        with killed_in_the_end(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stranger:
            assert stranger.stdout and stranger.stdout.readline() == b"there 0\n"
            os.kill(second, signal.SIGKILL)
            assert said.seats(2) == [first, said.begun()["c#0"]]
            end_well(ranks, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_agents_kill_their_ranks_when_nothing_is_heard_of_who_decides(tmp_path: Path, shell: str, how: int) -> None:
    words = SUPERVISOR.format(shell=shell, program=RANK, folder=str(tmp_path))
    said = Said(tmp_path)
    with killed_in_the_end([sys.executable, "-c", words]) as supervisor:
        seats = said.seats(1)
        until(lambda: len(said.begun()) == 4, "the spares")
        seen = started_by({supervisor.pid})
        supervisor.send_signal(how)
        until(lambda: all(map(is_gone, (*seats, *said.begun().values()))), "the end of its ranks", timeout_s=30)
    all_gone(*seen)
