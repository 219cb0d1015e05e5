"""Ranks that agents start: what they get, how they end together, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from introduced import meet
from processes import killed_in_the_end
from unit.kept_job import SHELL, code_of, is_gone
from waiting import PATIENCE_S, until

from mlflash.errors import LaunchFailed
from mlflash.launch.cause import Cause
from mlflash.launch.lines import pack
from mlflash.launch.own_process import running
from mlflash.launch.rank_processes import RankProcesses, _WholeLines
from mlflash.run import agents
from mlflash.run.agents import Agents
from mlflash.run.launch_systems import OnSsh, address_of
from mlflash.run.started_ranks import StartedRanks
from mlflash.run.started_ranks import start as start_ranks

# A shell may take a signal just before it waits for a command, and hear it after that.
LISTENS = """
import os, signal, sys
words = {signal.SIGUSR1: "one", signal.SIGUSR2: "two", signal.SIGTERM: "term"}
signal.pthread_sigmask(signal.SIG_BLOCK, words)
with open(sys.argv[1] + os.environ["RANK"], "w") as said:
    print("listens", file=said, flush=True)
    heard = None
    while heard != signal.SIGTERM:
        heard = signal.sigwait(words)
        print(words[heard], file=said, flush=True)
raise SystemExit(3)
"""
SUPERVISOR = """
from mlflash.run.agents import Agents
from mlflash.run.launch_systems import OnSsh
from mlflash.run.started_ranks import start
with Agents(OnSsh(["a"], {shell!r})) as agents:
    start(agents, ["a"], 2, {argv!r}, {{}})._over.wait()
"""

Start = Callable[..., StartedRanks]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a program of a shell on hosts, each of which writes its process number to a file of its rank."""
    shell = tmp_path / "ssh"
    shell.write_text(SHELL.format(folder=tmp_path))
    shell.chmod(0o700)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    started: list[StartedRanks] = []
    launchers: dict[tuple[str, ...], Agents] = {}

    def begin(hosts: str, program: str, per_node: int = 1, **env: str) -> StartedRanks:
        names = tuple(hosts.split(","))
        if names not in launchers:
            launchers[names] = opened.enter_context(Agents(OnSsh(names, str(shell))))
        launcher = launchers[names]
        whole = f"echo $$ > {tmp_path}/new-$RANK; mv {tmp_path}/new-$RANK {tmp_path}/pid-$RANK\n{program}"
        started.append(start_ranks(launcher, names, per_node, ["sh", "-c", whole], env))
        return started[-1]

    with contextlib.ExitStack() as opened:
        yield begin
        for ranks in started:
            ranks.end(0)
            assert ranks.poll() is not None


def pid_of(folder: Path, what: str) -> int:
    path = folder / what
    return int(until(lambda: path.exists() and path.read_text().strip(), what))


def test_ranks_know_who_they_are_and_have_the_environment_and_directory_of_mlflash_run(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = 'it\'s $HOME "quoted"; exit\n\N{SNOWMAN}'
    for name, value in {"FI_PROVIDER": odd, "MLFLASH_XYZ": odd, "MY_OWN": odd, "PMI_RANK": "7", "SLURM_STEP_ID": "1",
                        "TORCHELASTIC_RUN_ID": "x", "SSH_TTY": "tty", "RANK": "9"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    program = f'exec {sys.executable} -c "import json, os; print(json.dumps([dict(os.environ), os.getcwd()]))" ' \
              f"> {tmp_path}/said-$RANK"  # fmt: skip
    ports = set()
    for _ in range(3):
        assert code_of(start("user@a,b", program, 2, MLFLASH_RUN=odd)) == 0
        said = [json.loads((tmp_path / f"said-{rank}").read_text()) for rank in range(4)]
        for rank, (environment, directory) in enumerate(said):
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "FROM_LOGIN")
            host = "user@a" if rank < 2 else "b"
            assert [environment[name] for name in names] == [str(rank), "4", str(rank % 2), "2", "a", host]
            assert [environment[name] for name in ("FI_PROVIDER", "MLFLASH_XYZ", "MY_OWN", "MLFLASH_RUN")] == [odd] * 4
            assert environment["PATH"] == os.environ["PATH"] and directory == str(tmp_path / "here")
            assert not {"PMI_RANK", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID", "SSH_TTY", "HOME"} & {*environment}
        ports |= {environment["MASTER_PORT"] for environment, _ in said}
    assert len(ports) == 3 and all(10_000 <= int(port) < 32_000 for port in ports)


@pytest.mark.parametrize(
    ("host", "address"),
    [("a", "a"), ("me@a.b", "a.b"), ("fe80::1", "fe80::1"), ("me@fe80::1%eth0", "fe80::1%eth0"),
     ("[fe80::1]", "fe80::1"), ("ssh://me@a:2222", "a"), ("ssh://[::1]:22", "::1")],
)  # fmt: skip
def test_a_host_has_its_address_however_ssh_is_given_it(host: str, address: str) -> None:
    assert address_of(host) == address


def test_lines_of_ranks_do_not_mix_and_none_is_lost(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    program = f"exec {sys.executable} -uc 'import os\nfor n in range(300):\n for c in os.environ[\"RANK\"] * 50:\n" \
              "  os.write(1, c.encode())\n os.write(1, b\"\\n\")\nos.write(1, b\"end\")'"  # fmt: skip
    assert code_of(start("a,b", program, 2)) == 0
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines) == sorted([str(rank) * 50 for rank in range(4)] * 300 + ["end"] * 4)


@pytest.mark.slow
def test_a_rank_that_fails_ends_all_on_all_hosts_with_its_code_and_one_that_is_done_ends_none(
    start: Start, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "go")
    program = f"""case $RANK in
0) exit 0;;
1) read word < {tmp_path}/go; exit 7;;
2) trap "" TERM; while :; do sleep 1000; done;;
esac
exec sleep 1000"""
    ranks = start("a,b", program, 2)
    pids = [pid_of(tmp_path, f"pid-{rank}") for rank in range(4)]
    until(lambda: is_gone(pids[0]) or None, "the end of rank 0")
    assert ranks.poll() is None and not any(map(is_gone, pids[1:]))
    (tmp_path / "go").write_text("\n")
    assert code_of(ranks) == 7 and all(map(is_gone, pids))


def test_the_rank_that_failed_first_is_the_cause_and_not_those_that_lose_their_connections(
    start: Start, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "go")
    program = f"""case $RANK in
0) read word < {tmp_path}/go; echo "ConnectionResetError: [Errno 104] Connection reset by peer" >&2; exit 1;;
1) printf "Traceback (most recent call last):\\nValueError: bad batch\\n" >&2; echo > {tmp_path}/go; exec sleep 1000;;
esac
exec sleep 1000"""
    ranks = start("a,b", program, 2)
    assert code_of(ranks) == 1
    cause = ranks.cause
    assert cause == Cause("error", "ValueError: bad batch", "", 1, "a")


def test_a_rank_that_a_signal_ends_was_killed_from_outside_or_by_its_agent(start: Start, tmp_path: Path) -> None:
    for told, code in (("rank", signal.SIGKILL), ("agent", signal.SIGTERM)):
        ranks = start("a", f"echo $PPID > {tmp_path}/agent; exec sleep 1000")
        pid = pid_of(tmp_path, "pid-0")
        os.kill(pid if told == "rank" else pid_of(tmp_path, "agent"), code)
        assert code_of(ranks) == 128 + code
        (tmp_path / "pid-0").unlink()
        cause = ranks.cause
        assert cause is not None and cause.kind == "killed" and cause.text == f"its process was killed by signal {code}"
        assert (cause.evidence == "from whoever sent it to its agent") == (told == "agent")


@pytest.mark.parametrize("host", ["dark", "gone"])
def test_a_host_that_does_not_answer_is_named_and_no_rank_is_started_elsewhere(
    start: Start, tmp_path: Path, host: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if host == "dark":
        monkeypatch.setattr(agents, "ANSWER_S", 1.0)
    code = code_of(start(f"a,{host}", "echo started"))
    said = capfd.readouterr()
    expected = {
        "dark": "no rank on dark: it has not answered within 1 s",
        "gone": "no rank on gone: ssh ended with exit code 255",
    }
    assert code == 255 and re.search(expected[host], said.err) and "started" not in said.out
    assert not (tmp_path / "pid-0").exists()
    pid = pid_of(tmp_path, f"shell-{host}")
    until(lambda: is_gone(pid), "the end of the shell")


def test_what_cannot_be_started_is_said_with_the_host(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with Agents(OnSsh(["a", "a"], str(tmp_path / "ssh"))) as launcher:
        assert launcher.hosts == ["a"], "a host that is named twice is one node"
        ranks = start_ranks(launcher, ["a"], 3, ["/no/such/program"], {})
        assert ranks._over.wait(10.0) and ranks.poll() == 127, "an agent whose ranks do not end is lost after 15 s"
        assert launcher.is_there("a")
    assert "no rank on a: /no/such/program cannot be started: No such file" in capfd.readouterr().err
    monkeypatch.setattr(os, "getcwd", lambda: "/not/there")
    assert code_of(start("a", "true")) == 1
    assert "no rank on a: there is no directory /not/there for its ranks" in capfd.readouterr().err
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    with pytest.raises(LaunchFailed, match="no directory to start in"):
        start("a", "true")


@pytest.mark.parametrize("told", ["the supervisor's", "the agent's"])
def test_signals_reach_all_ranks(start: Start, tmp_path: Path, told: str) -> None:
    program = f"echo $PPID > {tmp_path}/agent-$RANK; exec {sys.executable} -Sc '{LISTENS}' {tmp_path}/said-"
    ranks = start("a,b", program, 2)

    def said(rank: int) -> list[str]:
        path = tmp_path / f"said-{rank}"
        return path.read_text().split() if path.exists() else []

    for number, word in ((0, "listens"), (signal.SIGUSR1, "one"), (signal.SIGUSR2, "two"), (signal.SIGTERM, "term")):
        if number and told == "the supervisor's":
            ranks.signal(number)
        elif number:
            for agent in {pid_of(tmp_path, f"agent-{rank}") for rank in range(4)}:
                os.kill(agent, number)
        until(lambda word=word: all(word in said(rank) for rank in range(4)), f"{word} of all ranks")
    assert code_of(ranks) == 3


@pytest.mark.parametrize("who", ["agent", "shell and agent", "supervisor"])
def test_nothing_is_left_whoever_is_killed(start: Start, tmp_path: Path, who: str) -> None:
    program = f"""trap "" TERM; echo $PPID > {tmp_path}/agent-$RANK
sleep 1000 & echo $! > {tmp_path}/child-$RANK; wait; exec sleep 1000"""
    with contextlib.ExitStack() as opened:
        if who == "supervisor":
            argv = ["sh", "-c", f"echo $$ > {tmp_path}/pid-$RANK\n{program}"]
            words = SUPERVISOR.format(shell=str(tmp_path / "ssh"), argv=argv)
            opened.enter_context(killed_in_the_end([sys.executable, "-c", words]))
        else:
            start("a", program, 2)
        pids = [pid_of(tmp_path, f"{what}-{rank}") for rank in range(2) for what in ("pid", "child")]
        agent = pid_of(tmp_path, "agent-0")
    if who == "agent":
        os.kill(agent, signal.SIGKILL)
    elif who != "supervisor":
        os.killpg(os.getpgid(agent), signal.SIGKILL)
    until(lambda: all(map(is_gone, [*pids, agent])) or None, "the end of all of it")


def test_an_agent_that_hears_nothing_any_more_kills_its_ranks(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        told = {"address": listener.getsockname(), "token": secrets.token_hex(16), "host": "a", "lost_s": 1.25}
        words = running("mlflash.launch.agent")
        with subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as agent:
            assert agent.stdin is not None and agent.stderr is not None
            agent.stdin.write(json.dumps(told).encode() + b"\n")
            agent.stdin.flush()
            sock, _ = listener.accept()
            with sock:
                assert meet(sock, told["token"]) == {"host": "a"}
                start = {"id": 1, "do": "start", "name": "a#0", "directory": str(tmp_path), "kept": 0}
                program = f"echo $$ > {tmp_path}/pid; exec sleep 1000"
                sock.sendall(pack({**start, "argv": ["sh", "-c", program], "environment": {"LOCAL_RANK": "0"}}))
                assert agent.wait(PATIENCE_S) == 255
            assert b"nothing was heard from `mlflash run` for 1 s" in agent.stderr.read()
    assert is_gone(pid_of(tmp_path, "pid"))


def test_the_token_of_the_agents_is_in_no_environment_and_no_command_line(start: Start, tmp_path: Path) -> None:
    ranks = start("a", f"echo $PPID > {tmp_path}/agent; exec sleep 1000")
    for pid in (pid_of(tmp_path, "pid-0"), pid_of(tmp_path, "agent")):
        for what in ("environ", "cmdline"):
            assert ranks._agents.token.encode() not in Path(f"/proc/{pid}/{what}").read_bytes()


def test_output_that_nobody_reads_holds_up_ranks_and_no_signs_of_life(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.pipe()
    printed = agents._write
    monkeypatch.setattr(agents, "_write", lambda fd, text: printed(write, text))
    ranks = start("a", f"yes | head -c 30000000; echo > {tmp_path}/through; exec sleep 1000")
    unread = 0
    until(lambda: ranks._agents._nodes["a"].heard, "the agent")
    while unread < 30_000_000:
        assert not (tmp_path / "through").exists() or unread > 20_000_000
        unread += len(os.read(read, 1 << 20))
    until((tmp_path / "through").exists, "all to be printed")
    os.close(read)
    os.close(write)


def test_an_agent_that_is_killed_is_started_again_for_the_next_start(start: Start, tmp_path: Path) -> None:
    first = start("a", f"echo $PPID > {tmp_path}/agent; exec sleep 1000")
    agent = pid_of(tmp_path, "agent")
    rank = pid_of(tmp_path, "pid-0")
    os.kill(agent, signal.SIGKILL)
    assert code_of(first) == 255
    until(lambda: is_gone(rank), "the end of its rank")
    assert code_of(start("a", "exit 5")) == 5


def test_a_node_whose_status_hangs_is_silent_and_its_ranks_go_on(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 1000\n")
    (tmp_path / "nvidia-smi").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with Agents(OnSsh(["localhost"]), 1.0) as launcher:
        ranks = start_ranks(launcher, ["localhost"], 1, ["sleep", "1000"], {})
        told = {"memory": str(tmp_path), "job": "j", "interface": ""}
        assert launcher.ask(["localhost"], "status", 3.0, **told) == {}, "it is said within three lost_s"
        assert ranks.poll() is None
        ranks.end()
        assert ranks.poll() == 128 + signal.SIGTERM


def test_output_that_ends_while_an_agent_ends_ends_it_no_earlier() -> None:
    async def end() -> dict[int, Any]:
        ranks = object.__new__(RankProcesses)  # without its process
        ranks._loop, ranks._ranks, ranks._pipes = asyncio.get_running_loop(), {}, {}
        ended, writes = os.pipe()
        os.close(writes)  # nobody has it open any more
        ranks._pipes[ended] = open(ended, "rb", 0), _WholeLines(1)
        ranks._kill_all()
        return ranks._pipes

    assert asyncio.run(end()) == {}
