"""The command ``mlflash doctor``: the checks of each process, then of MPI, then those that need all ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterable

import click

from ..config import DISABLE, from_environment
from ..errors import ConfigError, DeadlineExceeded, MlflashError, MpiUnavailable, WorldMismatch, pip_install
from ..launch.launcher_variables import launched
from ..mpi.world import World, abort_all, find_comm, load_mpi
from ..text import listed
from . import completion
from . import doctor_checks as checks
from .doctor_findings import Context, Diagnosis, Finding, Level, Watch, merge, warning, wrong
from .options import (
    BYTES,
    certify_after_option,
    draining_option,
    gradients_option,
    json_option,
    light_option,
    memory_option,
)
from .run_on_ranks import FINE, WRONG, raise_deadline


@click.command()
@click.option("--need", callback=BYTES, help="State of one rank, such as 12GiB or 80GB: check that its slots fit.")
@click.option("--redundancy", shell_complete=completion.schemes,
              help="Scheme that --need is counted for.  [default: MLFLASH_REDUNDANCY, or copy]")  # fmt: skip
@draining_option
@certify_after_option
@light_option
@gradients_option
@click.option("--nodes", type=click.IntRange(1), help="Nodes of the job.  [default: as started]")
@click.option("--ranks-per-node", type=click.IntRange(1), help="Ranks on each node.  [default: as started]")
@click.option("--timeout", type=click.FloatRange(1), default=60, show_default=True, metavar="SECONDS",
              help="Longest time of each check.")  # fmt: skip
@memory_option
@json_option
def doctor(need: int | None, redundancy: str | None, draining: bool, certify_after: int, light: int,
           gradients: int | None, nodes: int | None, ranks_per_node: int | None, timeout: float, memory: str,
           as_json: bool) -> None:  # fmt: skip
    """Check nodes, MPI, memory, Slurm and software before a job runs. Start it as you will start the training.

    \b
    mlflash doctor
    srun -N2 --ntasks-per-node=8 --mpi=pmi2 mlflash doctor --need 12GiB

    The line below a warning or an error says what to do. Exits with 1 if a check finds an error.
    """
    try:
        environment = {**os.environ, DISABLE: ""}  # the check of the environment reports it
        settings = from_environment(environment, None, job="any", memory=memory, redundancy=redundancy, drain_every=0)
        settings = dataclasses.replace(settings, certify_after=certify_after or settings.certify_after)
        context = Context(settings, os.environ, launched(os.environ), need, settings.slots_if(draining), nodes,
                          ranks_per_node, light, gradients)  # fmt: skip
    except (ConfigError, WorldMismatch) as error:
        raise click.UsageError(str(error)) from None
    watch = Watch(context.rank == 0, as_json, timeout)
    examination = Examination(context, watch, timeout)
    try:
        diagnosis = examination.run()
        if context.rank == 0:
            diagnosis.print(as_json)
            sys.stdout.flush()
        code = examination.end(WRONG if diagnosis.count(Level.ERROR) else FINE)
    finally:
        watch.over()
    sys.exit(code)


Check = Callable[[Context], Iterable[Finding]]
_CHECKS: dict[str, tuple[Check, ...]] = {
    "software": (checks.versions, checks.environment, checks.parity, checks.compression, checks.couriers_here),
    "GPU": (checks.gpus,),
    "Slurm": (checks.slurm,),
    "memory": (
        checks.file_system,
        checks.lifetime,
        checks.logout,
        checks.writing,
        checks.disk,
        checks.memlock,
        checks.left_over,
    ),
}
_CHECKS_OF_MPI: tuple[Check, ...] = checks.library, checks.world_size
_CHECKS_OF_ALL_RANKS: dict[str, tuple[Check, ...]] = {
    "MPI": (checks.nodes, checks.failure_domains, checks.clocks, checks.network),
}
_SUBJECTS = ("MPI", "memory", "Slurm", "software", "GPU")
_ADVICE = {
    "memory": "make {memory} writable, or name another memory file system with --memory",
    "MPI": "look at the stderr of all ranks and at the network between the nodes; try MLFLASH_TRANSPORT=p2p, or "
           "another transport of MPI (MPIR_CVAR_CH4_NETMOD, UCX_TLS, FI_PROVIDER)",
}  # fmt: skip
_REPORT = "the check itself failed, so its subject was not checked: please report this"
_START = ("srun --mpi=list shows what this Slurm has (Open MPI: pmix; MPICH, Intel MPI: pmi2; Cray: cray_shasta); or "
          "start with the mpiexec of the library that mpi4py loads")  # fmt: skip
_HANGS = "a rank hangs or is dead: look at its stderr and at the network between the nodes"
_GRACE_S = 10.0  # other ranks wait this much longer than rank 0, which prints


class Examination:
    """The checks that this process makes, each within ``timeout_s`` seconds, and their results so far."""

    def __init__(self, context: Context, watch: Watch, timeout_s: float):
        self.context, self._watch, self._timeout_s = context, watch, timeout_s
        self._findings: list[Finding] = []  # on rank 0 those of all ranks, as soon as they are gathered
        self._is_broken = False  # ranks are no longer in step

    def run(self) -> Diagnosis:
        """Make all checks. Only rank 0 gets all results. Collective over the ranks, if MPI can start."""
        for subject, alone in _CHECKS.items():
            for check in alone:
                self._make(subject, check)
        self._make("MPI", self._start)
        if self.context.world is not None:
            for check in _CHECKS_OF_MPI if self.context.mpi is not None else ():
                self._make("MPI", check)
            self._make("memory", checks.room)
            for subject, together in _CHECKS_OF_ALL_RANKS.items():
                for check in (self._gather, *together, self._gather):
                    self._make(subject, check, together=True)
        return self.known()

    def known(self) -> Diagnosis:
        lines = sorted(merge(self._located()), key=lambda line: _SUBJECTS.index(line.subject))
        launcher = checks.name_of(self.context.launched)
        return Diagnosis(f"started by {launcher}" if launcher else "started alone", self.context.ranks_on, tuple(lines))

    def end(self, code: int) -> int:
        """End MPI after everything was printed, and return the exit code of rank 0. Collective over the ranks."""
        self._watch.begin(dataclasses.replace(wrong("end", "", _HANGS), subject="MPI"), None)
        world, mpi = self.context.world, self.context.mpi
        if mpi is None:
            return code
        if world is None or self._is_broken:
            abort_all(mpi, code)
        else:
            try:
                world.start_job(raise_deadline)
                code = world.broadcast(code, 0)
                world.free()
            except DeadlineExceeded:
                abort_all(mpi, code)
        mpi.Finalize()
        return code

    def _start(self, context: Context) -> Iterable[Finding]:
        comm = None
        try:
            with contextlib.suppress(WorldMismatch):  # world_size reports it
                comm = find_comm(context.environment)
            context.mpi = load_mpi()
        except MpiUnavailable as error:
            make = wrong if context.launched.size > 1 else warning
            yield make("library", "{error}", f"{pip_install('mpich')}, or load your cluster's MPI",
                       error=error.message)  # fmt: skip
        patience_s = self._timeout_s + (_GRACE_S if context.rank else 0)
        context.world = World(comm, context.settings.here, patience_s).connect()

    def _gather(self, context: Context) -> Iterable[Finding]:
        """Send the results to rank 0. Merge them within each node first, where most are the same."""
        world = context.ranks
        of_node = merge(finding for findings in world.gather(self._located(), world.node) for finding in findings)
        of_nodes = world.gather(of_node, world.leaders) if world.local_rank == 0 else []
        self._findings = [finding for findings in of_nodes for finding in findings] if world.rank == 0 else []
        return ()

    def _make(self, subject: str, check: Check, together: bool = False) -> None:
        """Make a check, of this process or, if they are still in step, of all ranks together."""
        if together and self._is_broken:
            return
        name, values = check.__name__.strip("_").replace("_", " "), {"memory": self.context.settings.memory}
        advice = _START if check == self._start else _ADVICE.get(subject, _REPORT)
        self._watch.begin(dataclasses.replace(wrong(name, "", advice, **values), subject=subject), self.known())
        findings: list[Finding] = []
        try:
            if together:
                self.context.ranks.start_job(raise_deadline)
            findings += check(self.context)
        except DeadlineExceeded as error:
            ranks = [f"rank {rank} on {node}" for rank, node in zip(error.ranks, error.nodes, strict=False)]
            text = f"waited {{waited_s}} for {listed(ranks) or 'the other ranks'}; later checks are skipped"
            findings.append(wrong(name, text, _HANGS, waited_s=self._timeout_s))
            self._is_broken = True
        except Exception as error:
            kind = "" if isinstance(error, MlflashError) else f"{type(error).__name__}: "
            text = kind + "; ".join(line.strip() for line in str(error).splitlines())
            findings.append(wrong(name, "{error}", advice, error=text, **values))
            self._is_broken |= together or check == self._start
            if self._is_broken and self.context.rank:
                print(f"{name}: {text}", file=sys.stderr)
                time.sleep(self._timeout_s + 2 * _GRACE_S)  # rank 0 waits in vain, and then ends this process
        self._findings += [dataclasses.replace(finding, subject=subject) for finding in findings]

    def _located(self) -> list[Finding]:
        """Return the results so far. Those of this process get its node and rank, as MPI knows them by now."""
        rank, ranks_on = self.context.rank, self.context.ranks_on
        nodes = tuple(node for node in ranks_on if rank in ranks_on[node])
        return [finding if finding.nodes else dataclasses.replace(finding, nodes=nodes, ranks=(rank,))
                for finding in self._findings]  # fmt: skip
