"""Where a directory is mounted from, and whether other jobs on the node see the same directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..memory.mounts import MEMORY_KINDS, Mount
from .findings import Finding, fine, warning

_CONTAINERS = {
    "APPTAINER_CONTAINER": "apptainer", "SINGULARITY_CONTAINER": "singularity", "ENROOT_ROOTFS": "enroot",
    "container": "a container",
}  # fmt: skip
_WITH_PROCESS_1 = ("docker", "podman")  # process 1 is inside; a mount that differs from its mount was made inside, too


def kind(mount: Mount | None, memory: str) -> Finding:
    """Check that the memory file system is in memory."""
    if mount is None:
        return fine("file system", "the mount of {memory} is unknown", memory=memory)
    if mount.kind in MEMORY_KINDS:
        return fine("file system", "{memory} is {kind}", memory=memory, kind=mount.kind)
    return warning("file system", "{memory} is {kind}, which is not memory", "saves will be as slow as this file "
                   "system: give --memory /dev/shm", memory=memory, kind=mount.kind)  # fmt: skip


def lasting(mine: Mount | None, init: Mount | None, memory: str, container: str, env: Mapping[str, str]) -> Finding:
    """Say whether files in memory outlive a job step and a job, as far as a process inside can know.

    Args:
        mine: the mount that this process sees there.
        init: the mount that process 1 sees there. None: it cannot be seen.
        memory: the memory file system.
        container: the kind of container of this process; "": no known one.
        env: environment of this process.
    """
    check = "lifetime"
    if mine is None or init is None:
        return fine(check, "unknown whether {memory} is private to this job: /proc/1/mountinfo is hidden",
                    memory=memory)  # fmt: skip
    if mine.device == init.device:
        if container not in _WITH_PROCESS_1:
            return fine(check, "{memory} is that of the node: it outlives job steps and jobs", memory=memory)
        return fine(check, "{memory} is that of process 1 in {container}; unknown whether it is that of the node",
                    memory=memory, container=container)  # fmt: skip
    if container and container not in _WITH_PROCESS_1:
        return warning(
            check, "{memory} belongs to {container} and is deleted with it",
            "give the container the node's /dev/shm (docker --ipc=host; apptainer without --contain; pyxis "
            "--container-mounts=/dev/shm), or keep one container for all relaunches", memory=memory,
            container=container,
        )  # fmt: skip
    if "SLURM_JOB_ID" in env:
        return warning(
            check, "{memory} is private to this job: it outlives a job step, but not the job",
            "relaunch inside the job (mlflash run, or a loop in the batch script): after a requeue memory is empty. "
            "As root, set Dirs=/tmp in job_container.conf: jobs then use the node's /dev/shm", memory=memory,
        )  # fmt: skip
    return warning(check, "{memory} is in a private mount namespace and is deleted with it",
                   "start all relaunches in this namespace", memory=memory)  # fmt: skip


def container_of(env: Mapping[str, str], root: str = "/") -> str:
    """Name the kind of container that this process is in; "" if nothing shows that there is one. Not collective."""
    if Path(root, ".dockerenv").exists():
        return "docker"
    if Path(root, "run/.containerenv").exists():
        return "podman"
    return next((name for variable, name in _CONTAINERS.items() if env.get(variable)), "")
