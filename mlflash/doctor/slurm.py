"""What Slurm does with memory between job steps and jobs, by its configuration."""

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
    """Ask Slurm for its configuration. Not collective; for one rank, because each call is a request to slurmctld."""
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
        yield warning("configuration", "scontrol show config does not answer: {error}",
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
    """Judge the parts of Slurm's configuration that concern memory.

    Args:
        config: as :func:`parse` returns it.
    """
    container = config.get("JobContainerType", "")
    if container.endswith("tmpfs"):
        yield warning(
            "job container", f"{container}: each job has its own /dev/shm, unless Dirs= in job_container.conf leaves "
            "it out", "memory outlives a job step, but not the job: relaunch inside the job (mlflash run), and do not "
            "requeue",
        )  # fmt: skip
    else:
        yield fine("job container", "none" if container in _NONE else container)
    yield script("epilog", config.get("Epilog", ""), "at the end of a job", "")
    yield script("task epilog", config.get("TaskEpilog", ""), "at the end of each task",
                 ": a relaunch in the same job would find nothing")  # fmt: skip


def script(check: str, names: str, when: str, harm: str) -> Finding:
    """Check whether a script that Slurm runs mentions shared memory.

    Args:
        check: name of the script.
        names: paths or patterns, separated by spaces.
        when: when it runs.
        harm: what would happen if it deleted files in memory.
    """
    if names in _NONE:
        return fine(check, "none")
    files = sorted(file for name in names.split() for file in glob.glob(name))
    texts = {file: _text(file) for file in files}
    wiping = [(file, line) for file, text in texts.items() for line in (text or "").splitlines() if _wipes(line)]
    if wiping:
        file, line = wiping[0]
        return warning(check, "{file} runs {when} and has: {line}", f"make it spare /dev/shm/mlflash-*{harm}",
                       file=file, when=when, line=line.strip()[:100])  # fmt: skip
    if files and None not in texts.values():
        return fine(check, "{names} runs {when} and does not mention shm", names=names, when=when)
    return warning(check, "{names} runs {when}, but cannot be read here",
                   f"ask your site whether it deletes files in /dev/shm, or leave a file there and see{harm}; "
                   "scontrol show config | grep -i epilog", names=names, when=when)  # fmt: skip


def _wipes(line: str) -> bool:
    code = line.split("#", 1)[0] if not line.startswith("#!") else ""
    return re.search(r"\bshm\b", code) is not None


def _text(file: str) -> str | None:
    try:
        return Path(file).read_text(errors="replace")
    except OSError:
        return None
