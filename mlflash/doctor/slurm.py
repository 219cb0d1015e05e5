"""What Slurm is set up to do with memory between steps and jobs."""

from __future__ import annotations

import glob
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from .findings import Finding, fine, warning

_TIMEOUT_S = 10
_NONE = ("", "(null)", "none", "job_container/none")


def configuration(env: Mapping[str, str]) -> Iterator[Finding]:
    """Ask Slurm how it is set up. Not collective; for one rank, as each call is a request to the one slurmctld."""
    if "SLURM_JOB_ID" not in env:
        yield fine("job", "not in a Slurm job")
        return
    job, nodes = env["SLURM_JOB_ID"], env.get("SLURM_JOB_NODELIST", "?")
    count = env.get("SLURM_RESTART_COUNT", "0")
    yield fine("job", f"job {job} on {nodes}" + f", restarted {count} times" * (count != "0"))
    try:
        shown = subprocess.run(["scontrol", "show", "config"], timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL,
                               capture_output=True, check=True)  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or b""
        text = said.decode(errors="replace").strip().rpartition("\n")[2] or str(error)
        yield warning("configuration", "scontrol show config gives no answer: {error}",
                      "look at Epilog, TaskEpilog and JobContainerType on a login node", error=text)  # fmt: skip
        return
    yield from judge_configuration(parse(shown.stdout.decode(errors="replace")))


def parse(text: str) -> dict[str, str]:
    """Read ``scontrol show config``: lines ``Key = value``; ``Epilog[0]``, ``Epilog[1]`` are joined with a space."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = re.fullmatch(r"(\w+)(?:\[\d+\])?\s*=\s?(.*?)\s*", line)
        if match is not None:
            found[match[1]] = " ".join(filter(None, (found.get(match[1], ""), match[2])))
    return found


def judge_configuration(config: Mapping[str, str]) -> Iterator[Finding]:
    """Judge what is of interest in Slurm's configuration.

    Args:
        config: as :func:`parse` gives it.
    """
    container = config.get("JobContainerType", "")
    if container.endswith("tmpfs"):
        yield warning(
            "job container", f"{container}: each job has a /dev/shm of its own, where Dirs= in job_container.conf does "
            "not leave it out", "it outlives a step and not the job: relaunch inside the job (mlflash run), do not "
            "requeue",
        )  # fmt: skip
    else:
        yield fine("job container", "none" if container in _NONE else container)
    yield script("epilog", config.get("Epilog", ""), "at the end of a job", "")
    yield script("task epilog", config.get("TaskEpilog", ""), "at the end of each task",
                 ": a relaunch in the same job would find nothing")  # fmt: skip


def script(check: str, names: str, when: str, harm: str) -> Finding:
    """Look whether a script that Slurm runs speaks of shared memory.

    Args:
        check: what it is.
        names: paths or patterns, separated by spaces.
        when: it runs.
        harm: what would happen if it wiped memory.
    """
    if names in _NONE:
        return fine(check, "none")
    files = sorted(file for name in names.split() for file in glob.glob(name))
    texts = {file: _text(file) for file in files}
    wiping = [(file, line) for file, text in texts.items() for line in (text or "").splitlines() if _wipes(line)]
    if wiping:
        file, line = wiping[0]
        return warning(check, "{file} runs {when} and has: {line}", f"see that it spares /dev/shm/mlflash-*{harm}",
                       file=file, when=when, line=line.strip()[:100])  # fmt: skip
    if files and None not in texts.values():
        return fine(check, "{names} runs {when}; nothing in it speaks of shm", names=names, when=when)
    return warning(check, "{names} runs {when}, and cannot be read here",
                   f"ask the site whether it deletes files in /dev/shm (or log a file there){harm}; "
                   "scontrol show config | grep -i epilog", names=names, when=when)  # fmt: skip


def _wipes(line: str) -> bool:
    code = line.split("#", 1)[0] if not line.startswith("#!") else ""
    return re.search(r"\bshm\b", code) is not None


def _text(file: str) -> str | None:
    try:
        return Path(file).read_text(errors="replace")
    except OSError:
        return None
