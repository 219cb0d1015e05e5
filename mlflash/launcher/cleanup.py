"""The end of a job: copy the newest checkpoint in memory to the directory, then clean the memory of the nodes."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from ..errors import LaunchFailed
from ..wireup.own_process import running
from .launch_system import Launcher
from .node_assignment import NodeAssignment
from .node_watch import LOOK_S, Looks
from .run_options import RunOptions

log = logging.getLogger("mlflash")

_NAP_S = 0.1
_SCAVENGE_S = 1800.0


def wind_up(launcher: Launcher, looks: Looks, options: RunOptions, hosts: Sequence[str]) -> bool | None:
    """Scavenge what the nodes hold in memory and clean their memory. No rank may still run there.

    Returns:
        Whether the directory has the checkpoint now. None if there was nothing to do or the job has no directory.
    """
    gone = launcher.gone(hosts)
    there = [host for host in hosts if host not in gone]
    looks.look(there)
    holding = looks.holding(there)
    scavenged = scavenge(launcher, options, holding) if options.directory and holding else None
    if holding and not options.keep_memory and scavenged is not False:
        clean = [*running("mlflash"), "clean", options.job, "--memory", options.memory]
        try:
            launcher.on_each(holding, clean, LOOK_S)
        except LaunchFailed as error:
            log.warning("the slots stay in the memory of the nodes, because cleaning it failed: %s", error)
    return scavenged


def scavenge(launcher: Launcher, options: RunOptions, hosts: Sequence[str]) -> bool:
    """Copy the newest checkpoint in the memory of these nodes to the directory. Return whether that succeeded."""
    words = ["-m", "mlflash", "scavenge", str(options.directory), "--job", options.job, "--memory", options.memory]
    try:
        step = launcher.start(NodeAssignment(tuple(hosts), 1), launcher.with_mpi(words), {})
    except LaunchFailed as error:
        log.warning("the newest checkpoint in memory cannot be copied to %s: %s", options.directory, error)
        return False
    end = time.monotonic() + _SCAVENGE_S
    while (code := step.poll()) is None and time.monotonic() < end:
        time.sleep(_NAP_S)
    step.end()
    return code == 0
