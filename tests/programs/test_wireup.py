"""Couriers that no launcher knows of: real MPICH, real processes, killed and forked again."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import needs
import pytest
from processes import started_by
from waiting import PATIENCE_S, until

from mlflash.launcher.processes import find_mpiexec, mpiexec
from mlflash.wireup.key_value_store import KeyValueStore
from mlflash.wireup.mpich_segments import mapped_by, named_after
from mlflash.wireup.pmi_server import new_epoch_name
from mlflash.wireup.store_client import StoreClient

TRAINER = Path(__file__).with_name("wireup_trainer.py")
RANKS = 3
SHM = Path("/dev/shm")

pytestmark = [
    needs.MPI,
    pytest.mark.skipif(os.environ.get("MLFLASH_TEST_MPI") == "openmpi", reason="needs MPICH: Open MPI speaks no PMI-1"),
]


class Job:
    """Trainers that do what the test says, and the store through which it says so."""

    def __init__(self, host: str = "127.0.0.1"):
        self.store = KeyValueStore(host)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        self.client = StoreClient(self.store.address, self.store.token)
        self.commands = [0] * RANKS
        self.trainers: list[subprocess.Popen[bytes]] = []
        self.took: list[float] = []  # ms of each epoch
        self.pids: set[int] = set()  # all that were ever known

    def _serve(self) -> None:
        while not self._is_over.is_set():
            self.store.step(0.05)

    def start(self, hydra: bool = False, site: Path | None = None) -> Job:
        """Start the trainers; what is to be done first in each Python is in ``sitecustomize.py`` of a directory."""
        command = [sys.executable, str(TRAINER), self.store.address[0], str(self.store.address[1])]
        command.append(self.store.token)
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "SLURM", "OMPI"))}
        paths = os.pathsep.join(filter(None, (site and str(site), os.environ["PYTHONPATH"])))
        environment = {**plain, "PYTHONPATH": paths, "MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp",
                       "PYTHONWARNINGS": "error"}  # fmt: skip
        if hydra:
            command, environment = mpiexec(RANKS, command, environment)
            self.trainers = [subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)]
        else:
            for rank in range(RANKS):
                names = {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
                self.trainers.append(subprocess.Popen(command, env={**environment, **names}, stdin=subprocess.DEVNULL))
        return self

    def ask(self, rank: int, command: str, *values: Any) -> int:
        number = self.commands[rank]
        self.commands[rank] += 1
        self.client.put(f"do/{rank}/{number}", json.dumps([command, *values]), PATIENCE_S)
        return number

    def answer(self, rank: int, number: int) -> Any:
        trainer = self.trainers[min(rank, len(self.trainers) - 1)]

        def answered() -> str | None:
            found = self.client.look(f"done/{rank}/{number}", PATIENCE_S)
            assert found or trainer.poll() in (None, 0), f"trainer {rank} ended with {trainer.returncode}"
            return found

        return json.loads(until(answered, f"trainer {rank} to answer"))

    def tell(self, rank: int, command: str, *values: Any) -> Any:
        return self.answer(rank, self.ask(rank, command, *values))

    def all(self, command: str, *values: Any, ranks: Sequence[int] = range(RANKS)) -> list[Any]:
        asked = [self.ask(rank, command, *values) for rank in ranks]
        return [self.answer(rank, number) for rank, number in zip(ranks, asked, strict=True)]

    def epoch(self, nodes: Sequence[int] = (0,) * RANKS) -> str:
        """Start an epoch, with an allreduce, and print how long it took."""
        name = new_epoch_name(1)
        took = self.all("start", name, list(nodes))
        forked, up, summed = (max(times) for times in zip(*took, strict=True))
        self.took.append(summed)
        print(
            f"epoch on nodes {list(nodes)}: forked {forked:.0f} ms, MPI up {up:.0f} ms, allreduce done {summed:.0f} ms"
        )
        self.pids |= {pid for pids in self.all("pids") for pid in pids}
        return name

    def stop(self) -> list[int]:
        self.all("stop")
        return [trainer.wait(PATIENCE_S) for trainer in self.trainers]

    def close(self) -> None:
        for trainer in self.trainers:
            if trainer.poll() is None:
                for pid in [*started_by({trainer.pid}), trainer.pid]:
                    os.kill(pid, signal.SIGKILL)
            trainer.wait(PATIENCE_S)
        self.client.close()
        self._is_over.set()
        self._thread.join()
        self.store.close()


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    job.close()


def lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def mapped(job: Job, nodes: Sequence[int] = (0,) * RANKS) -> set[str]:
    """The shared memory that MPI of the newest couriers has; there is some, and it knows who shares a node."""
    said_by = job.all("tell", "describe")
    assert [said["beside"] for said in said_by] == [nodes.count(node) for node in nodes]
    names = {name for said in said_by for name in said["segments"]}
    assert names and all((SHM / name).exists() for name in names)
    return names


@pytest.mark.gate
def test_a_killed_courier_is_replaced_by_a_new_epoch_and_leaves_nothing(job: Job) -> None:
    job.start()
    first = job.epoch()
    segments = mapped(job)
    assert job.tell(0, "ask") == {"running": True, "mpi": True}
    os.kill(job.tell(1, "pids")[2], signal.SIGKILL)
    assert job.tell(1, "wait") == [None, signal.SIGKILL, None]
    assert job.all("kill", ranks=(0, 2)) == [[None, signal.SIGKILL, None]] * 2
    assert job.tell(0, "ask") == {"running": False, "mpi": False}
    assert not [name for name in segments if (SHM / name).exists()]
    assert "used before" in job.tell(0, "fork", first, [0] * RANKS)

    job.epoch()
    segments |= mapped(job)
    assert job.all("end") == [[0, None, None]] * RANKS
    assert job.stop() == [0] * RANKS
    assert not [pid for pid in job.pids if lives(pid)]
    assert not [name for name in segments if (SHM / name).exists()]


def test_hydra_notices_nothing_of_couriers(job: Job) -> None:
    assert find_mpiexec()[1] == "mpich"
    job.start(hydra=True)
    job.epoch()
    os.kill(job.tell(1, "pids")[2], signal.SIGKILL)
    assert job.tell(1, "wait") == [None, signal.SIGKILL, None]
    job.all("kill", ranks=(0, 2))
    job.epoch([0, 0, 1])
    said = job.all("tell", "describe")[0]["environment"]
    assert not [
        name for name in said if name.startswith(("PMI", "HYD")) and name not in ("PMI_FD", "PMI_RANK", "PMI_SIZE")
    ]
    assert said["FI_PROVIDER"] == "tcp" and said["CUDA_VISIBLE_DEVICES"] == "" and said["OPENBLAS_NUM_THREADS"] == "1"
    job.all("end")
    assert job.stop() == [0]
    assert not [pid for pid in job.pids if lives(pid)]


def test_what_a_dead_trainer_has_begun_is_finished_and_then_nothing_is_left(job: Job, tmp_path: Path) -> None:
    job.start()
    job.epoch()
    segments = mapped(job)
    loader = job.tell(1, "fork_a_loader")
    trainer, zygote, courier = job.tell(1, "pids")
    path = tmp_path / "written"
    assert job.tell(1, "tell", "outlive", str(path)) == "works"
    os.kill(trainer, signal.SIGKILL)
    assert job.trainers[1].wait(PATIENCE_S) == -signal.SIGKILL
    until(path.exists, "the courier finishes")
    until(lambda: not lives(courier) and not lives(zygote), "courier and zygote are gone")
    assert lives(loader), "which holds all that its trainer had open"
    assert job.all("kill", ranks=(0, 2)) == [[None, signal.SIGKILL, None]] * 2
    assert not [name for name in segments if (SHM / name).exists()]
    os.kill(loader, signal.SIGKILL)
    job.all("stop", ranks=(0, 2))
    assert [job.trainers[rank].wait(PATIENCE_S) for rank in (0, 2)] == [0, 0]
    assert not [pid for pid in job.pids if lives(pid)]


def test_many_epochs_leave_no_descriptors_processes_keys_or_memory(job: Job) -> None:
    job.start()
    first = job.epoch()
    job.all("kill")
    before = job.all("descriptors")
    segments: set[str] = set()
    layouts = ([0, 0, 0], [0, 1, 2], [0, 1, 1], [0, 0, 1], [5, 7, 5])
    for number in range(10):
        nodes = layouts[number % len(layouts)]
        name = job.epoch(nodes)
        until(lambda name=name: not job.client.below(f"{name}/started/", PATIENCE_S), "what all needed is deleted")
        kept = job.client.below(f"{name}/", PATIENCE_S)
        assert kept.pop("up") == str(RANKS) and all(key.startswith("barrier/") for key in kept)
        segments |= mapped(job, nodes)
        ended = job.all("end" if number % 2 else "kill")
        assert ended == ([[0, None, None]] if number % 2 else [[None, signal.SIGKILL, None]]) * RANKS
        assert job.client.delete(f"{name}/", PATIENCE_S) >= 1 + len(kept)
    print(f"{RANKS} ranks, fork to allreduce done: median {statistics.median(job.took[1:]):.0f} ms of "
          f"{sorted(map(round, job.took[1:]))}")  # fmt: skip
    assert job.all("descriptors") == before
    assert not [pid for pid in job.pids - {pid for pids in job.all("pids") for pid in pids[:2]} if lives(pid)]
    assert not [name for name in segments if (SHM / name).exists()]
    job.client.delete("do", PATIENCE_S)
    job.client.delete("done", PATIENCE_S)
    assert 0 < len(job.store) == job.client.delete(f"{first}/", PATIENCE_S), "what the first epoch left"
    assert job.stop() == [0] * RANKS


def test_mpi_starts_where_addresses_go_from_node_to_node(job: Job, tmp_path: Path, monkeypatch: Any) -> None:
    asked = list[str]()
    page = job.store._page
    monkeypatch.setattr(job.store, "_page", lambda prefix, after: (asked.append(prefix), page(prefix, after))[1])
    (tmp_path / "sitecustomize.py").write_text(
        "from mlflash.wireup import address_relay\naddress_relay.FAN_OUT, address_relay.LEAST_NODES = 1, 2\n"
    )
    job.start(site=tmp_path)
    name = job.epoch([0, 1, 2])
    assert set(asked) == {f"{name}/put/"} and len(asked) == 2, "by nodes 0 and 1; node 2 asks node 1"
    until(lambda: not job.client.below(f"{name}/relay/", PATIENCE_S), "where nodes are is deleted")
    assert job.stop() == [0] * RANKS


def test_a_courier_has_what_is_its_own_and_tells_how_it_ends(job: Job) -> None:
    job.start()
    job.epoch()
    said = job.all("tell", "describe")[0]
    pids = job.tell(0, "pids")
    assert said["session"] == pids[2] and not said["torch"]
    assert not [line for line in Path(f"/proc/{pids[1]}/maps").read_text().splitlines() if "libtorch" in line]
    assert len(os.listdir(f"/proc/{pids[1]}/task")) == 1
    job.ask(0, "tell", "abort", 7)
    assert job.tell(0, "wait") == [None, signal.SIGKILL, "MPI_Abort(7)"]
    job.all("kill", ranks=(1, 2))

    alone = [0]
    assert isinstance(job.tell(2, "fork", new_epoch_name(2), alone, "exits", 0), int)
    assert job.tell(2, "wait") == [3, None, None]
    job.tell(2, "fork", new_epoch_name(2), alone, "raises", 0)
    assert job.tell(2, "wait") == [1, None, None]
    job.tell(2, "fork", new_epoch_name(2), alone, "speaks_no_pmi", 0)
    status, killed_by, why = job.tell(2, "wait")
    assert (status, killed_by) == (None, signal.SIGKILL) and "GET / HTTP/1.1" in why
    job.tell(2, "fork", new_epoch_name(2), alone, "before_mpi", 0, "f" * 32)
    status, killed_by, why = job.tell(2, "wait")
    assert (status, killed_by) == (None, signal.SIGKILL) and "no connection to the key-value store" in why
    assert "is not one of its entry points" in job.tell(2, "fork", new_epoch_name(2), alone, "do", 0)
    assert "no rank of an epoch" in job.tell(2, "fork", new_epoch_name(2), alone, "serve", 1)
    assert "no rank of an epoch" in job.tell(2, "fork", "a/b", alone, "serve", 0)


def test_a_zygote_that_hangs_costs_its_trainer_a_deadline_and_no_later_answer_is_taken_for_another(job: Job) -> None:
    job.start()
    job.tell(0, "fork", new_epoch_name(1), [0], "before_mpi", 0)
    zygote = job.tell(0, "pids")[1]
    os.kill(zygote, signal.SIGSTOP)
    assert job.tell(0, "ask", 0.05) == "waited 0.05 s for its zygote to answer"
    os.kill(zygote, signal.SIGCONT)
    assert job.tell(0, "kill") == [None, signal.SIGKILL, None]
    assert job.tell(0, "ask") == {"running": False, "mpi": False}
    job.tell(0, "fork", new_epoch_name(1), [0], "before_mpi", 0)
    job.pids = set(job.tell(0, "pids"))
    os.kill(zygote, signal.SIGSTOP)
    job.tell(0, "stop", 0.05)
    assert job.trainers[0].wait(PATIENCE_S) == 0
    until(lambda: not [pid for pid in job.pids if lives(pid)], "all are gone")


def test_a_courier_in_init_can_be_killed_while_others_never_come(job: Job) -> None:
    job.start()
    name, nodes = new_epoch_name(1), [0, 1, 2]
    job.all("fork", name, nodes, ranks=(0, 1))
    job.tell(2, "fork", name, nodes, "before_mpi")
    until(lambda: job.client.look(f"{name}/barrier/1", PATIENCE_S) == "2", "two couriers are in MPI_Init")
    assert job.tell(0, "ask") == {"running": True, "mpi": False}, "its zygote answers"
    assert job.all("kill") == [[None, signal.SIGKILL, None]] * RANKS

    # On one node they wait for each other in shared memory, and say nothing of it before they are killed.
    name = new_epoch_name(2)
    job.all("fork", name, [0, 0, 0], ranks=(0, 1))
    job.tell(2, "fork", name, [0, 0, 0], "before_mpi")
    segments = named_after(name, 0)
    couriers = [pids[2] for pids in job.all("pids")]
    until(lambda: all(mapped_by(pid) & segments for pid in couriers[:2]), "two couriers are in MPI_Init")
    for pid in couriers:
        os.kill(pid, signal.SIGKILL)
    assert job.all("wait") == [[None, signal.SIGKILL, None]] * RANKS
    assert not [name for name in segments if (SHM / name).exists()]
    job.epoch(nodes)
    assert job.stop() == [0] * RANKS, "which ends the couriers that are left"
    assert not [pid for pid in job.pids if lives(pid)]


def test_two_couriers_of_one_rank_do_not_hang(job: Job) -> None:
    job.start()
    name = new_epoch_name(1)
    job.tell(0, "fork", name, [0, 0], "serve", 0)
    job.tell(1, "fork", name, [0, 0], "serve", 0)
    assert "two couriers have this rank" in job.tell(1, "wait")[2]
    job.tell(0, "kill")


def test_a_killed_zygote_takes_its_courier_along_and_the_trainer_is_told(job: Job) -> None:
    job.start()
    job.epoch()
    segments = mapped(job)
    job.all("kill", ranks=(0, 2))
    assert all((SHM / name).exists() for name in segments), "of the courier that is left"
    _, zygote, courier = job.tell(1, "pids")
    os.kill(zygote, signal.SIGKILL)
    until(lambda: not lives(courier), "a courier that nobody would see")
    assert "has ended, with -9" in job.tell(1, "fork", new_epoch_name(2), [0], "serve", 0)
    job.tell(1, "stop")
    assert not [name for name in segments if (SHM / name).exists()]
    job.all("stop", ranks=(0, 2))
    assert [trainer.wait(PATIENCE_S) for trainer in job.trainers] == [0] * RANKS
