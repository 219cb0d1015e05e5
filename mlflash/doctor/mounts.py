"""Where a directory is mounted from, and whether other jobs of the node see the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..memory.mounts import MEMORY_KINDS, Mount
from .findings import Finding, fine, warning

_CONTAINERS = {
    "APPTAINER_CONTAINER": "apptainer", "SINGULARITY_CONTAINER": "singularity", "ENROOT_ROOTFS": "enroot",
    "container": "a container",
}  # fmt: skip
_WITH_PROCESS_1 = ("docker", "podman")  # what differs from that of process 1 there was mounted inside


def kind(mount: Mount | None, memory: str) -> Finding:
    """Say whether the memory file system is one."""
    if mount is None:
        return fine("file system", "what {memory} is on cannot be told", memory=memory)
    if mount.kind in MEMORY_KINDS:
        return fine("file system", "{memory} is {kind}", memory=memory, kind=mount.kind)
    return warning("file system", "{memory} is {kind}, which is not memory", "saves will be as slow as that: give "
                   "--memory /dev/shm", memory=memory, kind=mount.kind)  # fmt: skip


def lasting(mine: Mount | None, init: Mount | None, memory: str, container: str, env: Mapping[str, str]) -> Finding:
    """Say whether what is in memory outlives a step and a job, as far as that can be told from inside.

    Args:
        mine: what this process has there.
        init: what process 1 has there; None: it cannot be seen.
        memory: the memory file system.
        container: the kind of container that this process is in; "": none that is known.
        env: of this process.
    """
    check = "lifetime"
    if mine is None or init is None:
        return fine(check, "whether {memory} is this job's own cannot be told: /proc/1/mountinfo is hidden",
                    memory=memory)  # fmt: skip
    if mine.device == init.device:
        if container not in _WITH_PROCESS_1:
            return fine(check, "{memory} is the node's: it outlives steps and jobs", memory=memory)
        return fine(check, "{memory} is that of process 1 in {container}; whether that is the node's cannot be told",
                    memory=memory, container=container)  # fmt: skip
    if container and container not in _WITH_PROCESS_1:
        return warning(
            check, "{memory} belongs to {container}, and is gone with it",
            "give the container the node's (docker --ipc=host; apptainer without --contain; pyxis "
            "--container-mounts=/dev/shm), or keep one container for all relaunches", memory=memory,
            container=container,
        )  # fmt: skip
    if "SLURM_JOB_ID" in env:
        return warning(
            check, "{memory} is this job's own: it outlives a step, not the job",
            "relaunch inside the job (mlflash run, or a loop in the batch script): after a requeue memory is empty. "
            "As root, Dirs=/tmp in job_container.conf leaves /dev/shm to the node", memory=memory,
        )  # fmt: skip
    return warning(check, "{memory} is in a mount namespace of its own, and gone with it",
                   "start all relaunches in this namespace", memory=memory)  # fmt: skip


def container_of(env: Mapping[str, str], root: str = "/") -> str:
    """Name the kind of container that this process is in; "" where nothing tells of one. Not collective."""
    if Path(root, ".dockerenv").exists():
        return "docker"
    if Path(root, "run/.containerenv").exists():
        return "podman"
    return next((name for variable, name in _CONTAINERS.items() if env.get(variable)), "")
