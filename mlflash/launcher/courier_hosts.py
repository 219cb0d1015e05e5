"""A step of Slurm that starts the couriers of all ranks, so that commits go on when the ranks end.

When Slurm ends the ranks, it also ends everything that they have started, but nothing that another step of the job has
started. If this step cannot be started or has ended, ranks start their couriers themselves.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping

from ..config import is_enabled
from ..errors import LaunchFailed
from ..events import Event
from ..human_readable.wording import many
from ..wireup.own_process import running
from ..wireup.zygote_host import READY
from .on_slurm import COURIERS, OnSlurm, SlurmStep, beside
from .processes import spawn
from .run_options import RunOptions

log = logging.getLogger("mlflash")

_READY_S = 20.0
_END_S = 20.0  # limit for couriers whose trainers have ended
# If a number of cores per task were set, the step would get these cores for itself. Couriers must run on the cores that
# training does not use.
_CORES = ("SRUN_CPUS_PER_TASK", "SLURM_CPUS_PER_TASK")


class CourierHosts:
    """``mlflash courier`` on each node of an allocation, for couriers that are processes.

    A context manager. It waits until each node can start couriers.

    Args:
        slurm: the allocation.
        options: what is run.
        environment: of the ranks.
    """

    def __init__(self, slurm: OnSlurm, options: RunOptions, environment: Mapping[str, str] = os.environ):
        self._slurm = slurm
        self._step: SlurmStep | None = None
        self._command = [*running("mlflash"), "courier", "--job", options.job, "--memory", options.memory]
        self._is_wanted = is_enabled(environment) and environment.get("MLFLASH_COURIER") != "thread"
        self._environment = {name: value for name, value in environment.items() if name not in _CORES}
        self._left, self._are_ready = 0, Event()

    def __enter__(self) -> CourierHosts:
        if not self._is_wanted:
            return self
        try:
            hosts = self._slurm.hosts()
            self._left = len(hosts)
            words = beside(hosts, ["--cpu-bind=none", "--job-name", COURIERS], self._command)
            process = spawn(words, env=self._environment, stdout=subprocess.PIPE, text=True, errors="replace")
        except LaunchFailed as error:
            log.warning("ranks start their couriers themselves, and these end with their ranks: %s", error)
            return self
        self._step = SlurmStep(process, self._slurm.job, COURIERS)
        threading.Thread(target=self._listen, args=(process,), name="mlflash-courier-hosts", daemon=True).start()
        if not self._are_ready.wait(_READY_S) or self._left:
            log.warning("on %s of %d, ranks start their couriers themselves, and these end with their ranks",
                        many(self._left, "node"), len(hosts))  # fmt: skip
        return self

    def _listen(self, process: subprocess.Popen[str]) -> None:
        """Count the nodes that report that they are ready. Print everything else that the couriers print."""
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                if READY not in line:
                    print(line, end="", file=sys.stderr, flush=True)
                    continue
                self._left -= 1
                if not self._left:
                    self._are_ready.set()
        self._are_ready.set()

    def __exit__(self, *failure: object) -> None:
        if self._step is not None:
            self._step.let_end(_END_S)
