"""A real Slurm on the nodes of `nodes.py`: slurmctld on the head, a slurmd on every node, and a munged of its own.

Nothing of the machine is used or changed but the programs: no /etc/munge, no /run/munge, no /etc/slurm.

Needs root and Debian's packages slurm-wlm and munge; for ``srun --mpi=pmix`` also libpmix2.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from cluster.nodes import HEAD, Nodes
from cluster.slurm.jobs import Job
from waiting import PATIENCE_S, take, until

TOOLS = ("munged", "setpriv", "slurmctld", "slurmd", "srun")
LOOK_S = 0.2  # each look is a process or two
TAIL_LINES = 10
CPUS = 4  # that Slurm believes each node to have
SPOOL = "/tmp/slurmd"  # every node has a /tmp of its own: a job's script dies with its node, as on diskless nodes

# Debian's Slurm opens this file by its full path, where no LD_LIBRARY_PATH helps, and only libpmix-dev has it: each
# node gets a copy of the directory that has it too, mounted over the real one.
PMIX = Path(f"/usr/lib/{os.uname().machine}-linux-gnu/pmix2/lib")
PMIX_FILE = PMIX / "libpmix.so"


class Slurm:
    """Slurm on these nodes; all of them are idle. It ends with `close`, and by itself when this process dies.

    All nodes see ``path``, with the configuration, the logs, and what jobs print.
    """

    def __init__(self, nodes: Nodes):
        self.nodes = nodes
        self.path = nodes.path / "slurm"
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLASH_", "SLURM", "SBATCH_"))}
        self._environment["SLURM_CONF"] = str(self.path / "slurm.conf")
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._write_files()
            self._start_munged()
            self._furnish(HEAD)
            self._start("slurmctld", HEAD, ["setpriv", "--pdeathsig", "KILL", "slurmctld", "-D"])
            for host in nodes.names:
                self._furnish(host)
                self._start(host, host, ["slurmd", "-D", "-N", host])
            self._wait_until_idle()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Slurm:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()

    def close(self) -> None:
        """End Slurm and all else that runs on the nodes, and remove its files. May be called twice."""
        self.nodes.stop_all()
        for daemon in self._daemons.values():
            daemon.wait(PATIENCE_S)
        self._daemons = {}
        for host in (HEAD, *self.nodes.names):
            if self._is_up(host):
                self.nodes.run(host, "sh", "-c", f"umount {PMIX} 2> /dev/null; rm -rf {SPOOL} {SPOOL}.pid")
        shutil.rmtree(self.path, ignore_errors=True)

    # Commands and jobs

    def run(self, *argv: str, stdin: str = "", env: Mapping[str, str] | None = None, timeout: float = PATIENCE_S,
            check: bool = True) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run a command on the head, as a user does on a login node, and wait for its end.

        One that is killed at its deadline may leave on the nodes what it started there, until `close`.
        """
        command = self.nodes.command(HEAD, ["setpriv", "--pdeathsig", "KILL", *argv])
        try:
            done = subprocess.run(command, input=stdin, env={**self._environment, **(env or {})}, timeout=timeout,
                                  capture_output=True, text=True, check=False)  # fmt: skip
        except subprocess.TimeoutExpired as error:
            shown = "\n".join(str(part, "utf-8", "replace") for part in (error.stdout, error.stderr) if part)
            late = f"not within {timeout:g} s: the end of {shlex.join(argv)}\n{shown}\n{self.logs()}"
            raise TimeoutError(late) from None
        if check and done.returncode:
            shown = f"{shlex.join(argv)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
            raise RuntimeError(f"{shown}\n{self.logs()}")
        return done

    def sbatch(self, script: str, *options: str, env: Mapping[str, str] | None = None) -> Job:
        """Submit a job; what it prints goes to a file in ``path``. Options come before those in the script."""
        output = f"--output={self.path / 'job%j.out'}"
        command = ["sbatch", "--parsable", f"--chdir={self.path}", output, "--open-mode=append", *options]
        return Job(self, self.run(*command, stdin=script, env=env).stdout.strip())

    def wait(self, what: str | Callable[[], str], done: Callable[[], bool], timeout: float = PATIENCE_S) -> None:
        def looked() -> bool:
            if not (is_so := done()):
                take(LOOK_S)
            return is_so

        until(looked, lambda: f"{what if isinstance(what, str) else what()}\n{self.logs()}", timeout)

    # Nodes

    def _wait_until_idle(self) -> None:
        def states() -> list[str]:
            for name, daemon in self._daemons.items():
                if name not in self.nodes.names and daemon.poll() is not None:
                    raise RuntimeError(f"{name} ended with {daemon.returncode}\n{self.logs()}")
            return self.run("sinfo", "--noheader", "--Node", "--format=%T", check=False).stdout.split()

        self.wait("idle nodes", lambda: states() == ["idle"] * len(self.nodes.names))

    def kill_slurmd(self, host: str) -> None:
        """Kill the slurmd of a node: its jobs run on, also when the node is DOWN, until there is a slurmd again."""
        daemon = self._daemons[host]
        # What we started only waits: it stands outside the node's processes, and its child is the slurmd.
        (slurmd,) = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text().split()
        os.kill(int(slurmd), signal.SIGKILL)
        daemon.wait(PATIENCE_S)

    def logs(self) -> str:
        """The last lines of each daemon's log."""
        shown = []
        for log in sorted(self.path.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()
            shown.append("\n".join([f"--- {log.name}", *lines[-TAIL_LINES:]]))
        return "\n".join(shown)

    # Starting them

    def _write_files(self) -> None:
        (self.path / "state").mkdir(parents=True)
        (self.path / "slurm.conf").write_text(slurm_conf(self.path, self.nodes.names))
        key = self.path / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        if PMIX.exists() and not PMIX_FILE.exists():
            pmix = shutil.copytree(PMIX, self.path / "pmix", symlinks=True)
            (pmix / PMIX_FILE.name).symlink_to("libpmix.so.2")

    def _furnish(self, host: str) -> None:
        """Give a node what Slurm needs there."""
        mount = f"test -e {PMIX_FILE} || mount --bind {self.path}/pmix {PMIX}" if (self.path / "pmix").exists() else ":"
        script = f"set -e; {mount}; mkdir -p {SPOOL}"
        self.nodes.run(host, "sh", "-c", script)

    def _start_munged(self) -> None:
        # One for all nodes: they find its socket by its path, in a directory that is root's alone (hence the force).
        files = {"key-file": "key", "pid-file": "pid", "seed-file": "seed", "socket": "socket"}
        options = [f"--{option}={self.path}/munge.{file}" for option, file in files.items()]
        self._start("munged", HEAD, ["setpriv", "--pdeathsig", "KILL", "munged", "--foreground", "--force", *options])
        self.wait("munged's socket", (self.path / "munge.socket").exists)

    def _start(self, name: str, host: str, argv: Sequence[str]) -> None:
        with (self.path / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(self.nodes.command(host, argv), env=self._environment, cwd="/",
                                                   stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                                   start_new_session=True)  # fmt: skip

    def _is_up(self, host: str) -> bool:
        try:
            self.nodes.command(host, [])
        except KeyError:
            return False
        return True


def slurm_conf(path: Path, hosts: Sequence[str]) -> str:
    """A slurm.conf for jobs on these hosts: root runs everything, and there is neither systemd nor cgroup."""
    names = ",".join(hosts)
    settings = {
        "ClusterName": "mlflash",
        "SlurmctldHost": HEAD,
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "StateSaveLocation": path / "state",
        "SlurmctldPidFile": path / "slurmctld.pid",
        "SlurmdPidFile": f"{SPOOL}.pid",
        "SlurmdSpoolDir": SPOOL,
        "AuthType": "auth/munge",
        "CredType": "cred/munge",
        # A requeued job may start when the credentials of its last run have expired, one second later; Slurm's own
        # choice of 120 s would make each such test wait two minutes.
        "AuthInfo": f"socket={path / 'munge.socket'},cred_expire=10",
        # Processes are found by their parents, and bound to nothing.
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        # Believe this file, not the machine: more CPUs per node than there are.
        "SlurmdParameters": "config_overrides",
        "PropagateResourceLimits": "NONE",
        # Look for jobs that may start every second or two: by itself Slurm takes a minute.
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "batch_sched_delay=0,sched_interval=1,bf_interval=1",
        # A silent node is DOWN after 17 to 20 s (14 s with 5 and MessageTimeout 3), and used again as soon as its
        # slurmd reports (2).
        "SlurmdTimeout": 10,
        "SlurmctldTimeout": 10,
        "MessageTimeout": 5,
        "TCPTimeout": 2,
        "ReturnToService": 2,
        # From SIGTERM to SIGKILL.
        "KillWait": 5,
        "UnkillableStepTimeout": 20,
        "JobRequeue": 1,
        "MpiDefault": "none",
        "MailProg": "/bin/true",
    }
    lines = [f"{key}={value}" for key, value in settings.items()]
    lines.append(f"NodeName={names} CPUs={CPUS} RealMemory=4000 State=UNKNOWN")
    lines.append(f"PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP")
    return "\n".join(lines) + "\n"
