"""The slurm.conf of Slurm on nodes of namespaces: root runs everything, and there is neither systemd nor cgroup."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cluster.nodes import HEAD

CPUS = 4  # that Slurm believes each node to have
SPOOL = "/tmp/slurmd"  # every node has a /tmp of its own: a job's script dies with its node, as on diskless nodes


def slurm_conf(path: Path, hosts: Sequence[str]) -> str:
    """A slurm.conf for jobs on these hosts; all nodes see Slurm's own directory."""
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
