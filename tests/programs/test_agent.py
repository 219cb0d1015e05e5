"""The agent of a node: what it refuses to be and to do, whom it serves, and what outlives trainers."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import needs
import pytest
from harness import SUPPORT, PlainRanks
from processes import agents_of, is_agent, started_by
from waiting import PATIENCE_S, until

from mlflash.launch import agent_process
from mlflash.launch.agent_client import AgentClient, AgentRefused, HubLost
from mlflash.launch.couriers import Couriers
from mlflash.launch.launcher_variables import Launched
from mlflash.launch.own_process import forget_memory_policy
from mlflash.launch.rendezvous import Meeting
from mlflash.tools import doctor_checks

pytestmark = needs.MPI
BIN = Path(sys.executable).parent


def start(folder: Path, source: str, **more: Any) -> AgentClient:
    """An agent whose only entry point is the function `run` of a module with this source."""
    (folder / "entry.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    return AgentClient("entry:run", environment, PATIENCE_S, job=str(folder), **more)


def run(agent: AgentClient, epoch: int = 1) -> Any:
    """Let a courier run to its end, in a job of one rank; say how it ended."""
    with agent.channel(epoch):
        mine = ["node", "", []]
        told = agent.ask("next", PATIENCE_S, channel=epoch, last=epoch - 1, mine=mine, within_s=1.0, up_s=PATIENCE_S)
        assert told["number"] == epoch and told["nodes"] == [0]
        assert agent.wait_for(lambda: told["epoch"] in agent.ended, PATIENCE_S)
    return agent.ended[told["epoch"]]


def test_couriers_are_like_children_of_their_trainer_and_import_nothing_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    if sys.version_info >= (3, 11):  # an older Python looks there first
        (tmp_path / "work" / "socket.py").write_text("raise AssertionError('of the working directory')")
    monkeypatch.chdir(tmp_path / "work")
    source = (
        "import os, sys\n"
        "def run(courier):\n"
        "    name = open('/proc/self/comm').read().strip()\n"
        "    policy = open('/proc/self/numa_maps').readline().split()[1]\n"
        "    print(courier.rank, os.environ['WHOSE'], os.getcwd(), oct(os.umask(0)), name, policy)\n"
        "    print('wrong', file=sys.stderr)\n"
    )
    monkeypatch.setenv("WHOSE", "mine")
    before = os.umask(0o027)
    ctypes.CDLL(None).syscall(238, 2, ctypes.byref(ctypes.c_ulong(1)), 64)  # as `numactl --membind=0` does
    try:
        with open(tmp_path / "output", "w") as output:
            agent = start(tmp_path, source, mpi=False, output=output)
        assert run(agent).status == 0
    finally:
        os.umask(before)
        forget_memory_policy()
    said = (tmp_path / "output").read_text()
    assert said == f"0 mine {tmp_path}/work 0o27 courier-{os.getpid()} default\nwrong\n"
    assert run(agent, 2).status == 0, "another one"
    agent.close()
    until(lambda: not is_agent(agent.pid), "the end of the agent without trainers")


def test_a_courier_survives_signals_to_a_whole_step_and_ulimit_and_leaves_no_core_file(tmp_path: Path) -> None:
    source = (
        "import os, resource, signal\n"
        "def run(courier):\n"
        "    print(resource.getrlimit(resource.RLIMIT_CORE)[0], signal.getsignal(signal.SIGXFSZ).name)\n"
        "    for name in ('INT', 'TERM', 'HUP', 'USR1', 'USR2'):\n"
        "        os.kill(os.getpid(), signal.Signals['SIG' + name])\n"
        "        os.kill(os.getppid(), signal.Signals['SIG' + name])\n"
        "    print('commits')\n"
    )
    with open(tmp_path / "output", "w") as output:
        agent = start(tmp_path, source, output=output)
    end = run(agent)
    assert (end.status, end.signal) == (0, None)
    assert (tmp_path / "output").read_text() == "0 SIG_IGN\ncommits\n"
    agent.close()


def test_what_cannot_be_done_is_said_and_the_agent_goes_on(tmp_path: Path) -> None:
    with pytest.raises(AgentRefused, match="ModuleNotFoundError: No module named 'nowhere'"):
        start(tmp_path, "import nowhere\n")
    with pytest.raises(AgentRefused, match="imported torch"):
        start(tmp_path, "import sys, types\nsys.modules['torch'] = types.ModuleType('torch')\nrun = print\n",
              memory="another")  # fmt: skip
    agent = start(tmp_path, "run = print\n", mpi=False)
    resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (100, 417))
    serve = {"hosts": ["127.0.0.1"], "ports": [0], "token": "t" * 32}
    with pytest.raises(AgentRefused, match="needs 456 open files, and the hard limit of this host is 417: raise it"):
        agent.ask("serve", PATIENCE_S, **serve, size=200)
    with pytest.raises(AgentRefused, match="cannot listen at 192"):
        agent.ask("serve", PATIENCE_S, **serve | {"hosts": ["192.0.2.77"]}, size=2)
    for senseless in ("serve", "nothing", "_leave"):
        with pytest.raises((AgentRefused, HubLost)):
            agent.ask(senseless, PATIENCE_S)
    assert agent.ask("serve", PATIENCE_S, **serve, size=100)[0] == "127.0.0.1"
    assert run(agent).status == 0
    agent.close()


def test_one_agent_has_all_trainers_of_a_job_and_none_of_another_user_is_taken_for_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        agents = list(threads.map(lambda _: start(tmp_path, "run = print\n", mpi=False), range(16)))
    assert len({agent.pid for agent in agents}) == 1
    other = start(tmp_path, "run = print\n", mpi=False, memory="another")
    assert other.pid != agents[0].pid
    for agent in (*agents, other):
        agent.close()
    until(lambda: not is_agent(other.pid) and not is_agent(agents[0].pid), "the end of the agents")
    (name, *_) = agent_process.names_of("j", "", os.environ)
    squat = "import os, socket, sys\nos.setuid(65534)\ns = socket.socket(socket.AF_UNIX)\n" \
            "s.bind('\\0' + sys.argv[1])\ns.listen()\nprint('there', flush=True)\nsys.stdin.read()\n"  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-c", squat, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other_user:
        assert other_user.stdout is not None and other_user.stdin is not None
        other_user.stdout.readline()
        mine = AgentClient("builtins:print", os.environ, PATIENCE_S, job="j", mpi=False)
        assert is_agent(mine.pid)
        mine.close()
        other_user.stdin.close()


def test_who_says_nothing_to_an_agent_or_nonsense_delays_nobody(tmp_path: Path) -> None:
    agent = start(tmp_path, "run = print\n", mpi=False)
    silent = [agent_process.connect_again(agent._name) for _ in range(100)]
    for sent in (
        b"GET / HTTP\r\n\r\n",
        b"{}\n",
        b'{"channel": 77, "number": 1}\n',
        b'{"channel": []}\n',
        b"x" * (5 << 20),
    ):
        with agent_process.connect_again(agent._name) as sock:
            sock.settimeout(PATIENCE_S)
            try:
                sock.sendall(sent)
                while sock.recv(1 << 16):
                    pass
            except (BrokenPipeError, ConnectionResetError):
                pass
    assert run(agent).status == 0
    for sock in silent:
        sock.close()
    agent.close()
    until(lambda: not is_agent(agent.pid), "the end of the agent")


# Ranks that meet


def seat(rank: int, size: int, ports: list[tuple[str, int]], token: str, folder: Path) -> Couriers:
    told = lambda text, left: f"{ports[0][0]},{ports[0][1]},{token}" if rank else text or ""
    meeting = Meeting(Launched(rank, size, None, "test"), "a test", PATIENCE_S, told)
    return Couriers("entry:run", os.environ, PATIENCE_S, job=str(folder), agent=start(folder, "run = print\n"),
                    meeting=meeting)  # fmt: skip


def test_a_rank_of_another_launch_gets_no_seat_and_a_stranger_hears_nothing(tmp_path: Path) -> None:
    first = seat(0, 3, [], "", tmp_path)
    place, token = first._places[0], first._token
    second = seat(1, 3, [place], token, tmp_path)
    with pytest.raises(
        Exception, match=r"(?s)waited .* rank 1 is there already: these are the ranks of another launch"
    ):
        short = Meeting(
            Launched(1, 3, None, "test"), "a test", 1.0, lambda text, left: f"{place[0]},{place[1]},{token}"
        )
        Couriers("entry:run", os.environ, 1.0, agent=start(tmp_path, "run = print\n"), meeting=short)
    strangers = [socket.create_connection(place, PATIENCE_S) for _ in range(200)]
    for sent in (b'{"token": "guessed"}\n', b"GET / HTTP/1.1\r\n\r\n", b'{"do": "depart"}\n'):
        with socket.create_connection(place, PATIENCE_S) as sock:
            sock.sendall(sent)
            try:
                assert sock.recv(1) == b""
            except ConnectionError:
                pass
    third = seat(2, 3, [place], token, tmp_path)
    first.share("text", PATIENCE_S)
    assert [rank.share(None, PATIENCE_S) for rank in (second, third)] == ["text"] * 2
    for sock in strangers:
        sock.close()
    for couriers_of_rank in (third, second, first):
        couriers_of_rank.close()


# `mlflash agent`


class Job:
    """Two trainers, and an agent that was started before them."""

    def __init__(self, root: Path):
        self.root, self._launches = root, 0
        self.environment = {**os.environ, "MLFLASH_MEMORY": str(root), "MLFLASH_JOB": "j", "OMP_NUM_THREADS": "1"}
        self.environment.pop("SLURM_JOB_ID", None)
        self.agents: list[subprocess.Popen[str]] = []
        self.trainers: list[subprocess.Popen[bytes]] = []

    def agent(self) -> subprocess.Popen[str]:
        """Start an agent and wait until it is one."""
        self.agents.append(subprocess.Popen([BIN / "mlflash", "agent", "--job", "j", "--memory", str(self.root)],
                                            env=self.environment, text=True, stdout=subprocess.PIPE,
                                            stderr=subprocess.STDOUT))  # fmt: skip
        output = self.agents[-1].stdout
        assert output is not None and output.readline() == f"{agent_process.READY}\n"
        return self.agents[-1]

    def start(self, **spec: Any) -> None:
        self._launches += 1
        out = self.root / f"out-{self._launches}"
        out.mkdir()
        settings = {"memory": str(self.root), "job": "j", "timeout_s": PATIENCE_S}
        program = [sys.executable, str(SUPPORT / "dying_trainer.py"), json.dumps({"settings": settings, **spec})]
        self.ranks = PlainRanks(out, 2, program, self.environment)
        self.trainers = self.ranks.processes

    def close(self) -> None:
        everything = [*self.trainers, *self.agents]
        for pid in started_by({process.pid for process in everything}):
            os.kill(pid, signal.SIGKILL)
        for process in everything:
            process.kill()
            process.communicate(timeout=PATIENCE_S)


@pytest.fixture
def job(shm: Path) -> Iterator[Job]:
    job = Job(shm)
    yield job
    job.close()


def test_what_was_handed_over_is_committed_though_all_that_trainers_started_is_killed(job: Job) -> None:
    agent = job.agent()
    job.start(who="trainer", how="terminal closed")
    until(lambda: len(job.ranks.records("victim")) == 2, "the trainers to have saved")
    trainers = {trainer.pid for trainer in job.trainers}
    assert agents_of(trainers) == {agent.pid}
    assert not started_by(trainers), "what is to be killed with them"
    assert {trainer for pid, trainer in doctor_checks.running().items() if pid in started_by({agent.pid})} == trainers
    for pid in trainers:
        os.kill(pid, signal.SIGKILL)
    for trainer in job.trainers:
        trainer.wait(PATIENCE_S)
    until(lambda: not started_by({agent.pid}), "couriers to commit, and to end")
    job.start()
    assert job.ranks.wait() == [0, 0]
    assert [(record["step"], record["same"]) for record in job.ranks.records("restored")] == [(2, True)] * 2
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(PATIENCE_S) == 0


def test_an_agent_that_is_told_to_end_waits_for_its_couriers_and_a_killed_one_is_replaced(job: Job) -> None:
    first = job.agent()
    again = subprocess.run([BIN / "mlflash", "agent", "--job", "j", "--memory", str(job.root)], capture_output=True,
                           text=True, timeout=PATIENCE_S, check=False)  # fmt: skip
    assert again.returncode == 1 and "an agent of this job already runs on this node" in again.stderr
    first.kill()
    first.wait(PATIENCE_S)
    job.start()  # the first trainer starts an agent
    assert job.ranks.wait() == [0, 0]
    second = job.agent()
    job.start(who="trainer", how="terminal closed")
    until(lambda: len(job.ranks.records("victim")) == 2, "the trainers to have saved")
    second.send_signal(signal.SIGTERM)
    assert second.poll() is None and len(started_by({second.pid})) == 2, "it waits for its couriers"
    for trainer in job.trainers:
        trainer.kill()
        trainer.wait(PATIENCE_S)
    assert second.wait(PATIENCE_S) == 0
    job.start()
    assert job.ranks.wait() == [0, 0]
    assert [record["step"] for record in job.ranks.records("restored")] == [2, 2]


def test_a_process_that_knows_no_job_is_told_so(shm: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("MLFLASH_JOB", "SLURM_JOB_ID")}
    done = subprocess.run([BIN / "mlflash", "agent", "--memory", str(shm)], env=environment, capture_output=True,
                          text=True, timeout=PATIENCE_S, check=False)  # fmt: skip
    assert done.returncode == 2 and "set MLFLASH_JOB" in done.stderr
