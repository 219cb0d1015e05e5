"""What is done when the first node of a job dies, on which `mlflash run` itself runs.

After such a death Slurm leaves the job RUNNING without a batch script until its time limit (``--no-kill``). So the
agent of another node starts this program when `mlflash run` is lost. When Slurm reports that node as lost, it copies
the newest checkpoint in memory to the directory, and requeues the job. All ranks have been killed by their agents then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..errors import LaunchFailed
from ..launch.own_process import running
from .agents import Agents, Guard
from .launch_systems import OnSlurm, ask, hosts_of, is_lost, states_of
from .node_watch import Looks
from .started_ranks import RunLog
from .supervisor import RunOptions, wind_up

T = TypeVar("T")

_ASK_S = 3.0  # between two questions whether the node is lost
_SILENCE_S = 15.0  # since the loss of `mlflash run`: the other agents notice it, too, and kill their ranks
_ASK_AGAIN_S = 0.5
_ASK_LONG_S = 300.0


def guard_of(slurm: OnSlurm, options: RunOptions, run_log: Path | None) -> Guard | None:
    """What an agent of another node runs as the guard. None: this process is on no node of the job (in an salloc)."""
    here = os.environ.get("SLURMD_NODENAME", "")
    document = {"job": slurm.job, "host": here, "extra": slurm.extra, "options": dataclasses.asdict(options),
            "run_log": str(run_log.absolute()) if run_log else None,
            "slurm": {name: value for name, value in os.environ.items() if name.startswith("SLURM_")}}  # fmt: skip
    argv = running("mlflash.run.first_node_guard")
    return Guard(here, argv, json.dumps(document)) if here in slurm.hosts else None


def main() -> int:
    """Guard a job: ``python -m mlflash.run.first_node_guard``, told on standard input."""
    document = json.load(sys.stdin)
    # Agents must be started as `mlflash run` would start them, not as parts of this step.
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        del os.environ[name]
    os.environ.update(document["slurm"])
    # Requeuing also ends this process. Slurm gives it some time before it kills it (KillWait).
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _wait_until_lost(document["host"])
    run_log = RunLog(Path(document["run_log"]) if document["run_log"] else None)
    try:
        left = [host for host in _insist(lambda: hosts_of(document["job"])) if host != document["host"]]
        slurm = OnSlurm(document["job"], left, document["extra"])
        _take_over(slurm, document["host"], RunOptions(**document["options"]), run_log)
    except Exception as error:  # nobody reads what this process prints
        run_log.note("guard", why=f"node {document['host']} died, on which mlflash run was running", failed=repr(error))
        raise
    return 0


def _wait_until_lost(host: str) -> None:
    earliest, lost = time.monotonic() + _SILENCE_S, 0
    while lost < 2 or time.monotonic() < earliest:
        time.sleep(_ASK_S)
        lost = lost + 1 if _is_lost(host) else 0


def _is_lost(host: str) -> bool:
    try:
        return is_lost(states_of([host]).get(host, ""))  # a node that Slurm does not show is not known to be dead
    except LaunchFailed:  # slurmctld does not answer
        return False


def _insist(question: Callable[[], T]) -> T:
    """Ask Slurm until it answers: it may be slow right after a node has died, or not ready for an order yet."""
    end = time.monotonic() + _ASK_LONG_S
    while True:
        try:
            return question()
        except LaunchFailed:
            if time.monotonic() > end:
                raise
            time.sleep(_ASK_AGAIN_S)


def _take_over(slurm: OnSlurm, host: str, options: RunOptions, run_log: RunLog) -> None:
    """Wind up. Then requeue the job, or cancel it if requeuing is not allowed."""
    why = f"node {host} died, on which mlflash run was running"
    # Without a directory, memory is all that the job has when it starts again.
    options = dataclasses.replace(options, keep_memory=options.keep_memory or not options.directory)
    with Agents(slurm) as agents:
        scavenged = wind_up(agents, Looks(agents, options.memory, options.job, 0, ""), options)
    try:
        ask(["scontrol", "requeue", slurm.job])
    except LaunchFailed as error:
        run_log.note("guard", why=why, scavenged=scavenged, requeued=str(error))
        ask(["scancel", slurm.job], check=False)
        return
    run_log.note("guard", why=why, scavenged=scavenged, requeued=True)
    if slurm.hosts and (
        options.keep_memory or not scavenged
    ):  # on the same nodes, because their memory has the checkpoints
        with contextlib.suppress(LaunchFailed):
            _insist(lambda: ask(["scontrol", "update", f"jobid={slurm.job}", f"nodelist={','.join(slurm.hosts)}"]))


if __name__ == "__main__":
    sys.exit(main())
