"""The report of ``mlflash bench``: machine, figures, what was not run. Names and addresses are taken out of it.

Its form is version 1. Later versions may add fields, and another number means that a field has another meaning:

- ``format`` "mlflash-bench", ``version``, ``mlflash``, ``complete`` (whether the command came to its end), ``settings``
- ``nodes``: for each kind of node ``count`` and what `machine` returns, with ``names`` only by ``--names``
- ``fabric``: ``between``, ``library``, ``device``, ``mpi`` (of the couriers), ``variables``
- ``figures``: each has ``what``, ``redundancy`` and ``transport`` ("" if it has none), ``beside`` (the yardstick),
  ``nbytes`` (of each rank), ``seconds`` and ``beside_s`` (of the slowest rank, one for each repetition), ``median_s``,
  ``quartiles_s``, and ``ratio`` (median of the ratios within a repetition)
- ``not_run``: ``what`` and ``why``
"""

from __future__ import annotations

import getpass
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import LaunchFailed
from ..memory.memory_limits import mounted
from ..run.launch_systems import ask
from ..text import show_bytes, show_seconds
from .output import new_table

if TYPE_CHECKING:
    from rich.console import Console

FORMAT, VERSION = "mlflash-bench", 1
_FABRIC_VARIABLES = ("UCX_", "FI_", "MPIR_CVAR_", "I_MPI_", "MLFLASH_INTERFACE", "MLFLASH_LIBMPI", "SLURM_MPI_TYPE")
_PATH = re.compile(r"(?<![\w./])(?:PATH)?(?:/[\w.+@%~-]+)+/?")
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\b[0-9a-fA-F]{1,4}(?::[0-9a-fA-F]{0,4}){3,7}\b")
_SHORT = 3  # characters: a name of so few is taken out only where it is a word of its own


def machine(memory: str) -> dict[str, Any]:
    """Describe this node and its software. Not collective."""
    mount, stat = mounted(memory), os.statvfs(memory)
    versions = {"python": platform.python_version(), "kernel": platform.release()}
    for name in ("mpi4py", "numpy", "torch", "mlflash"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ""
    return {
        "cpu": cpu(), "cores": os.cpu_count(),
        "cores_allowed": len(os.sched_getaffinity(0)),
        "numa_nodes": len([*Path("/sys/devices/system/node").glob("node[0-9]*")]),
        "ram_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "memory_nbytes": stat.f_blocks * stat.f_frsize, "memory_kind": mount.kind if mount else "",
        "rdma": sorted(path.name.rstrip("0123456789") for path in Path("/sys/class/infiniband").glob("*")),
        "versions": versions, "slurm": _slurm(), **gpus(),
    }  # fmt: skip


def gpus() -> dict[str, Any]:
    """The names of the GPUs that torch sees, and their driver. torch is imported only if there is a device."""
    if not any(path for pattern in ("nvidia[0-9]*", "kfd") for path in Path("/dev").glob(pattern)):
        return {"gpus": [], "driver": ""}
    try:
        import torch
    except ImportError:
        return {"gpus": [], "driver": ""}
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    text = _read("/proc/driver/nvidia/version") + _read("/sys/module/amdgpu/version")
    found = re.search(r"\d+\.\d+(?:\.\d+)*", text)
    return {"gpus": names, "driver": found[0] if found else ""}


def _slurm() -> str:
    if shutil.which("sinfo") is None:
        return ""
    try:
        return ask(["sinfo", "--version"]).strip()
    except LaunchFailed:
        return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def cpu() -> str:
    """The model of this host's processors."""
    found = re.search(r"^model name\s*:\s*(.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return found[1].strip() if found and found[1].strip() else platform.machine()


def fabric_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that say how MPI uses the network."""
    return {name: value for name, value in sorted(environment.items()) if name.startswith(_FABRIC_VARIABLES)}


def private_words(memory: str) -> dict[str, str]:
    """What a report must not contain of this process: each word, and what stands in its place. Not collective."""
    host, home = socket.gethostname(), str(Path.home())
    places = dict.fromkeys((home, os.getcwd(), memory, sys.prefix, sys.base_prefix), "PATH")
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # this number has no name
        user = str(os.getuid())
    users = dict.fromkeys((user, os.environ.get("USER", ""), os.environ.get("LOGNAME", ""), Path(home).name), "USER")
    hosts = dict.fromkeys((host, host.partition(".")[0], os.environ.get("SLURMD_NODENAME", "")), "HOST")
    return {word: stands for word, stands in {**places, **users, **hosts}.items() if word.strip("/")}


def redacted(value: Any, words: Mapping[str, str]) -> Any:
    """Return a value of JSON whose strings have none of these words, no path and no address."""
    if isinstance(value, str):
        for word in sorted(words, key=len, reverse=True):
            edge = r"\b" if len(word) <= _SHORT else ""
            value = re.sub(edge + re.escape(word) + edge, words[word], value)
        return _ADDRESS.sub("ADDRESS", _PATH.sub("PATH", value))
    if isinstance(value, Mapping):
        return {name: redacted(each, words) for name, each in value.items()}
    return [redacted(each, words) for each in value] if isinstance(value, Sequence) else value


def figure(
    what: str,
    seconds: Sequence[float],
    beside: str,
    beside_s: Sequence[float],
    nbytes: int,
    redundancy: str = "",
    transport: str = "",
) -> dict[str, Any]:
    """Make a figure of seconds and of those of a yardstick in the same repetitions, both ``(repetitions,)``."""
    ratios = [one / other for one, other in zip(seconds, beside_s, strict=True)] if beside else []
    quartiles = statistics.quantiles(seconds, method="inclusive") if len(seconds) > 1 else [*seconds] * 3
    return {
        "what": what, "redundancy": redundancy, "transport": transport, "beside": beside, "nbytes": nbytes,
        "seconds": [*seconds], "beside_s": [*beside_s], "median_s": quartiles[1],
        "quartiles_s": [quartiles[0], quartiles[2]], "ratio": statistics.median(ratios) if ratios else None,
    }  # fmt: skip


def slowest(samples: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Take the maximum over the ranks of each repetition, by name."""
    ranks = [*samples]
    return {name: [max(times) for times in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print all of a report but the single repetitions."""

    def line(name: str, value: object) -> None:
        console.print(f"{name}: {value}", soft_wrap=True)

    line("mlflash", f"{report['mlflash']}, report version {report['version']}"
         + ("" if report["complete"] else ", not complete"))  # fmt: skip
    for node in report["nodes"]:
        line(f"{node['count']} x node", _words(node))
    line("settings", _words(report["settings"]))
    line("fabric", _words(report["fabric"]))
    table = new_table("what", "redundancy", "transport", ">median", ">quartiles", ">GB/s", ">times", "beside")
    for each in report["figures"]:
        low, high = each["quartiles_s"]
        speed = f"{each['nbytes'] / each['median_s'] / 1e9:.2f}" if each["nbytes"] > 1 << 10 else ""
        ratio = "" if each["ratio"] is None else f"{each['ratio']:.2f}"
        table.add_row(each["what"], each["redundancy"], each["transport"], _time(each["median_s"]),
                      f"{_time(low)} to {_time(high)}", speed, ratio, each["beside"])  # fmt: skip
    console.print(table)
    for each in report["not_run"]:
        line("not run", f"{each['what']}: {each['why']}")


def _time(seconds: float) -> str:
    return show_seconds(seconds) if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def _words(facts: Mapping[str, Any]) -> str:
    words = []
    for name, value in facts.items():
        if isinstance(value, Mapping):
            words += [f"{key} {each}" for key, each in value.items() if each != ""]
        elif value not in ("", [], None) and name != "count":
            text = (
                show_bytes(value)
                if name.endswith("nbytes")
                else ", ".join(map(str, value))
                if isinstance(value, list)
                else value
            )
            words.append(f"{name.removesuffix('_nbytes').replace('_', ' ')} {text}")
    return "; ".join(words)
