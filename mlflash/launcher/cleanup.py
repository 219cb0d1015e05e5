"""The end of a job: what is in memory goes to the directory, then the nodes' memory is cleaned."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence

from ..errors import LaunchFailed
from .launch_system import Launcher
from .node_assignment import NodeAssignment
from .node_watch import LOOK_S, Looks
from .run_options import RunOptions

log = logging.getLogger("mlflash")

_NAP_S = 0.1
_SCAVENGE_S = 1800.0


def wind_up(launcher: Launcher, looks: Looks, options: RunOptions, hosts: Sequence[str]) -> bool | None:
    """Scavenge what nodes hold and clean their memory; no rank may be left there.

    Returns:
        Whether the directory has it now; None where there was nothing to do, or is no directory.
    """
    gone = launcher.gone(hosts)
    there = [host for host in hosts if host not in gone]
    looks.look(there)
    holding = looks.holding(there)
    scavenged = scavenge(launcher, options, holding) if options.directory and holding else None
    if holding and not options.keep_memory and scavenged is not False:
        clean = [sys.executable, "-m", "mlflash", "clean", options.job, "--memory", options.memory]
        try:
            launcher.on_each(holding, clean, LOOK_S)
        except LaunchFailed as error:
            log.warning("the memory of the nodes is not cleaned: %s", error)
    return scavenged


def scavenge(launcher: Launcher, options: RunOptions, hosts: Sequence[str]) -> bool:
    """Bring the newest checkpoint in the memory of these nodes to the directory; says whether that went well."""
    words = ["-m", "mlflash", "scavenge", str(options.directory), "--job", options.job, "--memory", options.memory]
    try:
        step = launcher.start(NodeAssignment(tuple(hosts), 1), launcher.with_mpi(words), {})
    except LaunchFailed as error:
        log.warning("what is in memory cannot be brought to %s: %s", options.directory, error)
        return False
    end = time.monotonic() + _SCAVENGE_S
    while (code := step.poll()) is None and time.monotonic() < end:
        time.sleep(_NAP_S)
    step.end()
    return code == 0
