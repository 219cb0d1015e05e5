"""The agent of a node: what it refuses to be and to do, whom it serves, who meets, and what outlives trainers."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import needs
import pytest
from harness import SUPPORT, PlainRanks
from processes import agents_of, is_agent, killed_in_the_end, plain_environment, ran, started_by
from waiting import PATIENCE_S, is_in, until

from mlflash.errors import DeadlineExceeded
from mlflash.events import News
from mlflash.launch import agent_process
from mlflash.launch.agent_client import AgentClient, AgentRefused, HubLost
from mlflash.launch.couriers import Couriers, RankDeparted, RunningCourier
from mlflash.launch.launcher_variables import Launched
from mlflash.launch.own_process import forget_memory_policy
from mlflash.launch.rendezvous import Meeting, Ports
from mlflash.memory.process_names import read_stat
from mlflash.tools import doctor_checks as couriers

pytestmark = needs.MPI
BIN = Path(sys.executable).parent


def start(folder: Path, source: str, **more: Any) -> AgentClient:
    """An agent whose only entry point is the function `run` of a module with this source."""
    return AgentClient("entry:run", environment_for(folder, source), PATIENCE_S, job=str(folder), **more)


def environment_for(folder: Path, source: str) -> dict[str, str]:
    (folder / "entry.py").write_text(source)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def run(agent: AgentClient, epoch: int = 1) -> Any:
    """Let a courier run to its end, in a job of one rank; say how it ended."""
    with agent.channel(epoch):
        facts = ["node", "", []]
        begun = agent.ask("next", PATIENCE_S, channel=epoch, last=epoch - 1, facts=facts, within_s=1.0, up_s=PATIENCE_S)
        assert begun["number"] == epoch and begun["nodes"] == [0]
        assert agent.wait_for(lambda: begun["epoch"] in agent.ended, PATIENCE_S)
    return agent.ended[begun["epoch"]]


def test_couriers_are_like_children_of_their_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    if sys.version_info >= (3, 11):  # an older Python looks there first
        (tmp_path / "work" / "socket.py").write_text("raise AssertionError('of the working directory')")
    monkeypatch.chdir(tmp_path / "work")
    source = """
import os, sys
def run(courier):
    name = open('/proc/self/comm').read().strip()
    policy = open('/proc/self/numa_maps').readline().split()[1]
    print(courier.rank, os.environ['WHOSE'], os.getcwd(), oct(os.umask(0)), name, policy)
    print('wrong', file=sys.stderr)
"""
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


def test_a_courier_survives_signals_and_ulimit_and_leaves_no_core_file(tmp_path: Path) -> None:
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


def test_one_agent_has_all_trainers_of_a_job(tmp_path: Path) -> None:
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
    command = [sys.executable, "-c", squat, name]
    with killed_in_the_end(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other_user:
        other_user.stdout.readline()
        own = AgentClient("builtins:print", os.environ, PATIENCE_S, job="j", mpi=False)
        assert is_agent(own.pid)
        own.close()


def test_who_says_nothing_to_an_agent_or_nonsense_delays_nobody(tmp_path: Path) -> None:
    agent = start(tmp_path, "run = print\n", mpi=False)
    silent = [agent_process.connect_again(agent._name) for _ in range(100)]
    nonsense = (
        b"GET / HTTP\r\n\r\n",
        b"{}\n",
        b'{"channel": 77, "number": 1}\n',
        b'{"channel": []}\n',
        b"x" * (5 << 20),
    )
    for sent in nonsense:
        with agent_process.connect_again(agent._name) as sock:
            sock.settimeout(PATIENCE_S)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(sent)
                while sock.recv(1 << 16):
                    pass
    assert run(agent).status == 0
    for sock in silent:
        sock.close()
    agent.close()
    until(lambda: not is_agent(agent.pid), "the end of the agent")


# Ranks that meet


WAITS = "import time\ndef run(courier):\n    time.sleep(1000)\n"
ANOTHER = "rank 1 is there already: these are the ranks of another launch"
Start = Callable[..., "Launch"]


class Launch:
    """Ranks of one launch, which this process plays. Those ``apart`` have an agent of their own, as on another node."""

    def __init__(self, folder: Path, size: int, source: str = WAITS):
        self.folder, self.size, self.environment = folder, size, environment_for(folder, source)
        self.told = ""  # by rank 0
        self.ranks: list[Couriers] = []

    def seat(self, rank: int, apart: str = "", timeout_s: float = PATIENCE_S, host: str | None = None,
             ports: Ports | None = None) -> Couriers:  # fmt: skip
        meeting = Meeting(Launched(rank, self.size, None, "test"), "a test", timeout_s, self._share, ports)
        self.ranks.append(Couriers("entry:run", self.environment, timeout_s, job=str(self.folder), memory=apart,
                                   node=apart, host=host, meeting=meeting))  # fmt: skip
        return self.ranks[-1]

    def _share(self, text: str | None, left_s: float) -> str:
        self.told = self.told or (text or "").replace("::1,", "::1%1,")
        return self.told

    @property
    def place(self) -> tuple[str, int]:
        host, port, _ = self.told.split(",")
        return host, int(port)

    def ports(self, *before: tuple[str, int]) -> Ports:
        """What ranks know that have MASTER_PORT: where the hub is, after others."""
        return Ports([""], [*before, self.place], self.told.split(",")[2], "there")

    def epoch(self) -> int:
        """Let all ranks begin an epoch; return its number."""
        (number,) = {begun.result(PATIENCE_S).number for begun in [begin(rank) for rank in self.ranks]}
        return number


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Start]:
    launches: list[Launch] = []

    def begin(size: int, source: str = WAITS) -> Launch:
        launches.append(Launch(tmp_path, size, source))
        return launches[-1]

    yield begin
    for rank in [rank for played in reversed(launches) for rank in reversed(played.ranks)]:
        rank.close()


def call(asked: Callable[..., Any], *given: Any) -> Future[Any]:
    """Let a thread ask an agent something; return when it has."""
    answer: Future[Any] = Future()

    def ask() -> None:
        try:
            answer.set_result(asked(*given))
        except Exception as error:
            answer.set_exception(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    until(lambda: answer.done() or is_in(thread, News.wait_for), "the question")
    return answer


def begin(rank: Couriers) -> Future[RunningCourier]:
    return call(rank.next_epoch, PATIENCE_S)


def have_told(*ranks: Couriers) -> None:
    """Wait until agents have told the hub what they were asked before: so many turns of their loops later."""
    for rank in ranks:
        for _ in range(10):
            rank.agent.ask("share", PATIENCE_S, key="turn", text="")


def are_heard(*ranks: Couriers) -> None:
    """Wait until the hub has heard that, and these ranks what it has said before."""
    have_told(*ranks)
    for rank in ranks:
        assert rank.agent.ask("share", PATIENCE_S, key="turn", text=None) == ""


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def is_over(rank: Couriers, epoch: str) -> bool:
    return rank.agent.wait_for(lambda: epoch in rank.agent.over, PATIENCE_S)


def test_a_rank_of_another_launch_gets_no_seat_and_a_stranger_hears_nothing(launch: Start, tmp_path: Path) -> None:
    ranks = launch(3)
    first, second = ranks.seat(0), ranks.seat(1)
    node = start(tmp_path, WAITS, memory="apart")
    before = descriptors(node.pid)
    for apart in ("", "apart"):
        with pytest.raises(DeadlineExceeded, match=f"(?s)waited .* {ANOTHER}"):
            ranks.seat(1, apart, timeout_s=1.0)
    until(lambda: descriptors(node.pid) == before, "the end of its connection")
    node.close()
    strangers = [socket.create_connection(ranks.place, PATIENCE_S) for _ in range(200)]
    for sent in (b'{"token": "guessed"}\n', b"GET / HTTP/1.1\r\n\r\n", b'{"do": "depart"}\n'):
        with socket.create_connection(ranks.place, PATIENCE_S) as sock:
            sock.sendall(sent)
            with contextlib.suppress(ConnectionError):
                assert sock.recv(1) == b""
    third = ranks.seat(2)
    first.share("text", PATIENCE_S)
    assert [rank.share(None, PATIENCE_S) for rank in (second, third)] == ["text"] * 2
    assert ranks.epoch() == 1, "the refused one has taken the seat of nobody"
    for sock in strangers:
        sock.close()


def test_a_rank_that_outlives_its_launch_departs_from_no_other(launch: Start) -> None:
    before, after = launch(2), launch(2)
    first, late = before.seat(0), before.seat(1, "apart")
    first.close()
    until(lambda: not is_agent(first.agent.pid), "the end of the hub")
    for rank in range(2):
        after.seat(rank, ports=before.ports())
    with pytest.raises(AgentRefused, match=ANOTHER):
        late.next_epoch(PATIENCE_S)
    late.depart("it is late", PATIENCE_S)
    assert late.agent.ask("withdraw", PATIENCE_S) == [], "the hub has heard both"
    assert after.epoch() == 1


@pytest.mark.parametrize("stopped", ["its agent", "the hub"])
def test_an_epoch_that_begins_while_a_rank_withdraws_is_over_for_all(launch: Start, stopped: str) -> None:
    ranks = launch(3)
    first, second, third = (ranks.seat(rank, apart) for rank, apart in enumerate(("", "a", "b")))
    begun = [begin(first), begin(second)]
    are_heard(first, second)
    agent = (second if stopped == "its agent" else first).agent.pid
    until(lambda: read_stat(agent).state == "S", "it to have nothing to do")
    os.kill(agent, signal.SIGSTOP)
    try:
        begun.append(begin(third))
        have_told(third)
        withdrawn = call(second.agent.ask, "withdraw", PATIENCE_S)
        (begun[0] if stopped == "its agent" else begun[1]).exception(PATIENCE_S)
    finally:
        os.kill(agent, signal.SIGCONT)
    assert withdrawn.result(PATIENCE_S) == []
    with pytest.raises(AgentRefused, match="it was withdrawn"):
        begun.pop(1).result(PATIENCE_S)
    epochs = {courier.result(PATIENCE_S).epoch for courier in begun}
    assert all(is_over(rank, epoch) for rank in (first, third) for epoch in epochs)
    assert ranks.epoch() == 2


def test_an_epoch_over_before_its_courier_leaves_none(launch: Start) -> None:
    ranks = launch(2)
    first, second = ranks.seat(0), ranks.seat(1)
    fields = {"last": 0, "facts": ["", "", []], "within_s": PATIENCE_S, "up_s": PATIENCE_S}
    told = call(lambda: second.agent.ask("next", PATIENCE_S, channel=1, **fields))
    epoch = first.next_epoch(PATIENCE_S).epoch
    first.announce_end(PATIENCE_S)
    assert is_over(second, epoch)
    with second.agent.channel(1):
        assert told.result(PATIENCE_S)["epoch"] == epoch
    assert ranks.epoch() == 2
    assert {rank.agent.ended[epoch].signal for rank in ranks.ranks} == {signal.SIGKILL}


def test_a_courier_without_its_pmi_takes_no_others_descriptor(launch: Start) -> None:
    source = """
import os, socket, time
def run(courier):
    with socket.socket(fileno=int(os.environ['PMI_FD'])) as pmi:
        if courier.rank:
            pmi.shutdown(socket.SHUT_RD)
        pmi.sendall(b'cmd=barrier_in\\n')
        courier.channel.sendall(b'' if courier.rank else pmi.recv(100))
        time.sleep(1000)
"""
    ranks = launch(2, source)
    first, _ = ranks.seat(0), ranks.seat(1)
    assert ranks.epoch() == 1
    first.courier.channel.settimeout(PATIENCE_S)
    assert first.courier.channel.recv(100) == b"cmd=barrier_out rc=0\n"
    have_told(first)  # and the agent has told both couriers
    before = descriptors(first.agent.pid)
    connections = [agent_process.connect_again(first.agent._name) for _ in range(20)]
    until(lambda: descriptors(first.agent.pid) == before + 20, "each of them to have the next free descriptor")
    for other in connections:
        with other:
            other.settimeout(PATIENCE_S)
            other.sendall(b"{}\n")
            assert b"error" in other.recv(4096), "it is heard"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_an_address_with_a_scope_needs_no_thread_which_forbids_to_fork(launch: Start) -> None:
    ranks = launch(2)
    for rank in range(2):
        ranks.seat(rank, host="::1")
    assert ranks.place[0] == "::1%1" and ranks.epoch() == 1


def test_a_silent_listener_takes_no_time_from_the_next_port(launch: Start) -> None:
    ranks = launch(2)
    ranks.seat(0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        second = ranks.seat(1, timeout_s=PATIENCE_S / 3, ports=ranks.ports(silent.getsockname()))
    assert second._places == [ranks.place] and ranks.epoch() == 1


def test_who_departs_is_heard_though_the_hub_is_gone(launch: Start) -> None:
    ranks = launch(2)
    first, second = ranks.seat(0), ranks.seat(1, "apart")
    waiting = begin(second)
    are_heard(second)
    first.depart("it is done", PATIENCE_S)
    first.close()
    with pytest.raises(RankDeparted, match="rank 0 has left the job: it is done"):
        waiting.result(PATIENCE_S)
    until(lambda: not is_agent(first.agent.pid), "the end of the hub")
    with pytest.raises(RankDeparted, match="rank 0 has left the job: it is done"):
        second.next_epoch(PATIENCE_S / 3)
    with pytest.raises(HubLost, match="no connection to the hub"):
        until(lambda: second.depart("so am I", PATIENCE_S), "the agent to know")  # type: ignore[func-returns-value]


def test_a_connection_for_a_courier_that_comes_too_late_is_closed(tmp_path: Path) -> None:
    agent = start(tmp_path, "from mlflash.launch import seat\nseat._CHANNEL_S = 1.0\nrun = print\n", mpi=False)
    with pytest.raises(AgentRefused, match="its connection for the courier has not come"):
        agent.ask("next", PATIENCE_S, channel=1, last=0, facts=["", "", []], within_s=PATIENCE_S, up_s=PATIENCE_S)
    with agent.channel(1) as late:
        late.settimeout(PATIENCE_S)
        assert late.recv(1) == b""
    assert run(agent, 2).status == 0
    agent.close()


def test_an_epoch_goes_on_without_a_node_until_a_rank_of_it_is_back(launch: Start) -> None:
    ranks = launch(2)
    first, second = ranks.seat(0), ranks.seat(1, "apart")
    assert ranks.epoch() == 1
    epoch, connected = first.courier.epoch, descriptors(first.agent.pid)
    os.kill(second.agent.pid, signal.SIGKILL)
    until(lambda: descriptors(first.agent.pid) < connected, "the hub to have lost the node")
    are_heard(first)
    assert epoch not in first.agent.over and epoch not in first.agent.ended
    back = begin(second)
    assert is_over(first, epoch)
    assert [begun.result(PATIENCE_S).number for begun in (begin(first), back)] == [2, 2]


# `mlflash agent`


class Job:
    """Two trainers, and an agent that was started before them."""

    def __init__(self, root: Path):
        self.root, self._launches = root, 0
        paths = os.environ["PYTHONPATH"]
        self.environment = plain_environment(MLFLASH_MEMORY=root, MLFLASH_JOB="j", OMP_NUM_THREADS=1, PYTHONPATH=paths)
        self.agents: list[subprocess.Popen[str]] = []
        self.trainers: list[subprocess.Popen[bytes]] = []

    def agent(self) -> subprocess.Popen[str]:
        """Start an agent and wait until it is one."""
        command = [BIN / "mlflash", "agent", "--job", "j", "--memory", str(self.root)]
        self.agents.append(subprocess.Popen(command, env=self.environment, text=True, stdout=subprocess.PIPE,
                                            stderr=subprocess.STDOUT))  # fmt: skip
        output = self.agents[-1].stdout
        assert output is not None and output.readline() == f"{agent_process.READY}\n"
        return self.agents[-1]

    def start(self, **spec: Any) -> None:
        """Start trainers; those that are to be killed are there when both have saved."""
        self._launches += 1
        out = self.root / f"out-{self._launches}"
        out.mkdir()
        settings = {"memory": str(self.root), "job": "j", "timeout_s": PATIENCE_S}
        program = [sys.executable, str(SUPPORT / "dying_trainer.py"), json.dumps({"settings": settings, **spec})]
        self.ranks = PlainRanks(out, 2, program, self.environment)
        self.trainers = self.ranks.processes
        if spec:
            until(lambda: len(self.ranks.records("victim")) == 2, "the trainers to have saved")

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


def test_what_was_handed_over_commits_though_all_is_killed(job: Job) -> None:
    agent = job.agent()
    job.start(who="trainer", how="terminal closed")
    trainers = {trainer.pid for trainer in job.trainers}
    assert agents_of(trainers) == {agent.pid}
    assert not started_by(trainers), "what is to be killed with them"
    assert {trainer for pid, trainer in couriers.running().items() if pid in started_by({agent.pid})} == trainers
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


def test_an_ending_agent_waits_and_a_killed_one_is_replaced(job: Job) -> None:
    first = job.agent()
    again = ran(BIN / "mlflash", "agent", "--job", "j", "--memory", job.root, code=1)
    assert "an agent of this job already runs on this node" in again.stderr
    first.kill()
    first.wait(PATIENCE_S)
    job.start()  # the first trainer starts an agent
    assert job.ranks.wait() == [0, 0]
    second = job.agent()
    job.start(who="trainer", how="terminal closed")
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
    assert "set MLFLASH_JOB" in ran(BIN / "mlflash", "agent", "--memory", shm, code=2).stderr
