"""A process that notices the death of the first node of a job, on which `mlflash run` itself runs.

After such a death Slurm leaves the job RUNNING without a batch script until its time limit (``--no-kill``). So a
process on another node listens for `mlflash run`. If it hears nothing and Slurm reports that node as lost, it ends the
ranks, copies the newest checkpoint in memory to the directory, and requeues the job.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from ..errors import LaunchFailed
from ..events import Event
from ..wireup.own_process import running
from .launch_system import RunLog, RunOptions
from .node_watch import Looks
from .on_slurm import OnSlurm, ask, beside, hosts_of, is_lost, states_of
from .processes import LastLines, kill, spawn
from .supervisor import wind_up

log = logging.getLogger("mlflash")

_BEAT_S = 3.0
_SILENCE_S = 15.0  # without a beat; then the guard asks Slurm
_CLOSE_S = 5.0
_ASK_AGAIN_S = 0.5
_ASK_LONG_S = 300.0
_BEAT, _BYE = "\n", "bye\n"


class Guard:
    """The guard as `mlflash run` sees it: it starts the guard, starts it again if its node dies, and sends it beats.

    A context manager. It does nothing if the job has no other node for the guard, or if this process runs on none of
    the job's nodes (in an salloc).
    """

    def __init__(self, slurm: OnSlurm, options: RunOptions, run_log: Path | None):
        here = os.environ.get("SLURMD_NODENAME", "")
        hosts = slurm.hosts()
        self._hosts = [host for host in reversed(hosts) if host != here] if here in hosts else []
        told = {"job": slurm.job, "host": here, "mpi": slurm.mpi, "extra": slurm.extra,
                "options": dataclasses.asdict(options), "run_log": str(run_log.absolute()) if run_log else None,
                "slurm": {name: value for name, value in os.environ.items() if name.startswith("SLURM_")}}  # fmt: skip
        self._command = [*running("mlflash.launcher.first_node_guard"), json.dumps(told)]
        self._ended = Event()
        self._thread = threading.Thread(target=self._keep, name="mlflash-guard", daemon=True)

    def __enter__(self) -> Guard:
        if self._hosts:
            self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._ended.set()
        if self._hosts:
            self._thread.join(3 * _CLOSE_S)

    def _keep(self) -> None:
        process: subprocess.Popen[str] | None = None
        errors: LastLines | None = None
        starts, wrong, has_ended = 0, False, False
        while True:
            if process is None or not _told(process, _BEAT):
                if process is not None and errors is not None:
                    _close(process)
                    if not has_ended:
                        log.warning("the guard of the first node of this job ended, and is started again: %s",
                                    errors.text())  # fmt: skip
                    has_ended = True
                process = None
                try:
                    process, starts, wrong = self._start(starts), starts + 1, False
                    errors = LastLines(process)
                except LaunchFailed as error:
                    if not wrong:
                        log.warning("the guard of the first node of this job could not be started: %s; "
                                    "mlflash run tries again", error)  # fmt: skip
                    wrong = True
            if self._ended.wait(_BEAT_S):
                break
        if process is not None:
            _told(process, _BYE)
            _close(process)

    def _start(self, starts: int) -> subprocess.Popen[str]:
        command = beside([self._hosts[starts % len(self._hosts)]], ["--output=none"], self._command)
        process = spawn(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)  # a guard that hangs reads nothing
        return process


def _told(process: subprocess.Popen[str], beat: str) -> bool:
    """Tell the guard that all is well. Return whether the guard still runs."""
    assert process.stdin is not None
    try:
        process.stdin.write(beat)
        process.stdin.flush()
    except OSError:
        return False
    return process.poll() is None


def _close(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    try:
        process.stdin.close()
    except OSError:
        pass
    try:
        process.wait(_CLOSE_S)
    except subprocess.TimeoutExpired:
        kill(process)


def main() -> int:
    """Guard a job: ``python -m mlflash.launcher.first_node_guard JSON``, with beats on standard input."""
    told = json.loads(sys.argv[1])
    # Steps must be started as `mlflash run` would start them, not as parts of this step.
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        del os.environ[name]
    os.environ.update(told["slurm"])
    if not _is_left_alone(told["host"]):
        return 0
    # Requeuing also ends this process. Slurm gives it some time before it kills it (KillWait).
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    run_log = RunLog(Path(told["run_log"]) if told["run_log"] else None)
    try:
        _take_over(
            OnSlurm(told["job"], told["mpi"], told["extra"]), told["host"], RunOptions(**told["options"]), run_log
        )
    except Exception as error:  # nobody reads what this process prints
        run_log.note("guard", why=f"node {told['host']} died, on which mlflash run was running", failed=repr(error))
        raise
    return 0


def _is_left_alone(host: str) -> bool:
    """Listen until `mlflash run` says goodbye (return False) or its node is lost (return True)."""
    hears, last, lost = True, time.monotonic(), 0
    while lost < 2:
        if not hears:
            time.sleep(_BEAT_S)
        elif select.select([0], [], [], _BEAT_S)[0]:
            said = os.read(0, 4096)
            if said.endswith(_BYE.encode()):
                return False
            # No more beats will come: srun died, with its node or alone. Slurm knows which.
            hears, last = said != b"", time.monotonic()
        if time.monotonic() - last > _SILENCE_S:
            lost = lost + 1 if _is_lost(host) else 0
    return True


def _is_lost(host: str) -> bool:
    try:
        return is_lost(states_of([host]).get(host, ""))  # a node that Slurm does not show is not known to be dead
    except LaunchFailed:  # slurmctld does not answer
        return False


def _hosts_left(job: str) -> list[str]:
    """The nodes of a job. slurmctld may answer slowly right after a node has died, so this asks again."""
    end = time.monotonic() + _ASK_LONG_S
    while True:
        try:
            return hosts_of(job)
        except LaunchFailed:
            if time.monotonic() > end:
                raise
            time.sleep(_ASK_AGAIN_S)


def _take_over(slurm: OnSlurm, host: str, options: RunOptions, run_log: RunLog) -> None:
    """End the ranks and wind up. Then requeue the job, or cancel it if requeuing is not allowed."""
    why = f"node {host} died, on which mlflash run was running"
    slurm.end_steps()
    left = [name for name in _hosts_left(slurm.job) if name != host]
    looks = Looks(slurm, options.memory, options.job, 0, "")
    scavenged = wind_up(slurm, looks, options, left)
    try:
        ask(["scontrol", "requeue", slurm.job])
    except LaunchFailed as error:
        run_log.note("guard", why=why, scavenged=scavenged, requeued=str(error))
        ask(["scancel", slurm.job], check=False)
        return
    run_log.note("guard", why=why, scavenged=scavenged, requeued=True)
    end = time.monotonic() + _ASK_LONG_S
    # Ask Slurm to start the job on the same nodes, because their memory has the checkpoints.
    while time.monotonic() < end and left and (options.keep_memory or not scavenged):
        try:
            ask(["scontrol", "update", f"jobid={slurm.job}", f"nodelist={','.join(left)}"])
            return
        except LaunchFailed:  # too early
            time.sleep(_ASK_AGAIN_S)


if __name__ == "__main__":
    sys.exit(main())
