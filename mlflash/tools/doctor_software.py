"""Checks of what is installed and set, and of what Slurm does with memory between job steps and jobs."""

from __future__ import annotations

import collections
import contextlib
import glob
import importlib.metadata
import platform
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..config import DISABLE, is_enabled, unknown_variables
from ..courier.loaded_versions import not_run_with
from ..errors import LaunchFailed
from ..placement.redundancy_scheme import parse
from ..run.on_slurm import ask
from .doctor_context import Context
from .doctor_findings import Finding, fine, warning

_NONE = ("", "(null)", "none", "job_container/none")


def versions(context: Context) -> Iterator[Finding]:
    """Name the installed packages and their versions, and a PyTorch with which mlflash was not run."""
    found = {}
    for name in ("mlflash", "numpy", "mpi4py", "h5py", "xxhash", "torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    text = ", ".join([f"Python {platform.python_version()}", *map(" ".join, found.items())])
    yield fine("versions", "{versions}", versions=text)
    if "torch" in found and (unknown := not_run_with(found["torch"])) is not None:
        yield warning("versions", unknown, "install one of these releases, or begin with a short run that you restore")


def environment(context: Context) -> Iterator[Finding]:
    """Check whether mlflash is turned off, and look for variables that look like settings but are not."""
    if not is_enabled(context.environment):
        setting = f"{DISABLE}={context.environment[DISABLE]}"
        yield warning("switch", f"{setting}: training saves and restores nothing", f"unset {DISABLE}")
    for name in unknown_variables(context.environment):
        yield warning("environment", f"{name} is not a setting of mlflash", "correct its name, or unset it")


def parity(context: Context) -> Iterator[Finding]:
    """Name the library that computes parity."""
    from ..protect.erasure_codes import library

    scheme = context.settings.redundancy
    by = re.sub(r"/\S*/", "", library())
    if by == "numpy" and parse(scheme).parity:
        yield warning("parity", "computed by numpy",
                      "install libisal2 of your distribution: ISA-L is several times as fast")  # fmt: skip
    else:
        yield fine("parity", "computed by {library}" + f"; {scheme} has no parity" * (not parse(scheme).parity),
                   library=by)  # fmt: skip


def compression(context: Context) -> Iterator[Finding]:
    """Check whether drained files can be compressed with the configured method."""
    method = context.settings.compression
    if method not in ("", "gzip"):
        from ..drain.hdf5_files import plugin

        plugin()
        yield fine("compression", f"of drained files: {method}")


# Slurm


def slurm(context: Context) -> Iterator[Finding]:
    """Ask Slurm for its configuration. For rank 0, because each call is a request to slurmctld."""
    if context.rank != 0:
        return
    if "SLURM_JOB_ID" not in context.environment:
        yield fine("job", "not in a Slurm job")
        return
    job, nodes, restarts = (context.environment.get(f"SLURM_{name}", "")
                            for name in ("JOB_ID", "JOB_NODELIST", "RESTART_COUNT"))  # fmt: skip
    yield fine("job", f"job {job} on {nodes}" + f", restarted {restarts} times" * bool(restarts))
    try:
        yield from judge_configuration(ask(["scontrol", "show", "config"]))
    except LaunchFailed as error:
        yield warning("configuration", "scontrol show config does not answer: {error}",
                      "look at Epilog, TaskEpilog and JobContainerType on a login node", error=str(error))  # fmt: skip


def judge_configuration(text: str) -> Iterator[Finding]:
    """Judge the parts of ``scontrol show config`` that concern memory. ``Epilog[0]``, ``Epilog[1]`` are one value."""
    config = collections.defaultdict[str, list[str]](list)
    for key, value in re.findall(r"^(\w+)(?:\[\d+\])?[ \t]*=[ \t]*(.*?)[ \t]*$", text, re.MULTILINE):
        config[key] += [] if value in _NONE else value.split()
    container = " ".join(config["JobContainerType"]) or "none"
    if container.endswith("tmpfs"):
        yield warning("job container", f"{container}: each job has its own /dev/shm, unless Dirs= in "
                      "job_container.conf leaves it out", "memory outlives a job step, but not the job: relaunch "
                      "inside the job (mlflash run), and do not requeue")  # fmt: skip
    else:
        yield fine("job container", container)
    yield judge_script("epilog", config["Epilog"], "at the end of a job", "")
    yield judge_script("task epilog", config["TaskEpilog"], "at the end of each task",
                       ": a relaunch in the same job would find nothing")  # fmt: skip


def judge_script(check: str, names: Sequence[str], when: str, harm: str) -> Finding:
    """Check whether a script that Slurm runs mentions shared memory. ``names`` are paths or patterns."""
    files = sorted(file for name in names for file in glob.glob(name))
    values = {"names": " ".join(names), "when": when}
    try:
        lines = [(file, line) for file in files for line in Path(file).read_text(errors="replace").splitlines()]
    except OSError:
        files, lines = [], []
    for file, line in lines:
        if re.search(r"\bshm\b", line.split("#", 1)[0]):
            return warning(check, "{file} runs {when} and has: {line}", f"make it spare /dev/shm/mlflash-*{harm}",
                           file=file, line=line.strip()[:100], **values)  # fmt: skip
    if not names:
        return fine(check, "none")
    if files:
        return fine(check, "{names} runs {when} and does not mention shm", **values)
    return warning(check, "{names} runs {when}, but cannot be read here",
                   f"ask your site whether it deletes files in /dev/shm, or leave a file there and see{harm}; "
                   "scontrol show config | grep -i epilog", **values)  # fmt: skip
