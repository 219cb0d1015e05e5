"""The libraries that mlflash uses, and the threads that compete with it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence

from ..config import DISABLE, is_enabled, unknown_variables
from ..errors import pip_install
from ..mpi.world import World
from ..placement.redundancy_scheme import parse
from ..protocol.loaded_versions import not_run_with
from .findings import Finding, fine, warning, wrong

_PACKAGES = ("mlflash", "numpy", "torch", "mpi4py", "h5py", "xxhash")


def versions() -> Iterator[Finding]:
    """Name the installed packages and their versions, and a PyTorch with which mlflash was not run."""
    found: dict[str, str] = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    packages = [f"{name} {found[name]}" if name in found else f"no {name}" for name in _PACKAGES]
    yield fine("versions", "{versions}", versions=", ".join([f"Python {platform.python_version()}", *packages]))
    if "torch" in found and (said := not_run_with(found["torch"])) is not None:
        yield warning("versions", said, "install one of these releases, or begin with a short run that you restore")
    if missing := sorted({*_PACKAGES} - found.keys() - {"torch"}):  # without torch, arrays can be saved
        yield wrong("versions", f"not installed: {', '.join(missing)}", f"{pip_install()} into this environment")


def switch(env: Mapping[str, str]) -> Iterator[Finding]:
    """Check whether mlflash is turned off."""
    if not is_enabled(env):
        yield warning("switch", f"{DISABLE}={env[DISABLE]}: training saves and restores nothing", f"unset {DISABLE}")


def environment(env: Mapping[str, str]) -> Iterator[Finding]:
    """Look for variables that look like settings but are not."""
    for name in unknown_variables(env):
        yield warning("environment", f"{name} is not a setting of mlflash", "correct its name, or unset it")


def checksums() -> Iterator[Finding]:
    """Try xxhash, which makes the checksums."""
    import xxhash

    xxhash.xxh3_64_intdigest(b"mlflash")
    yield fine("checksums", "XXH3-64 of xxhash {version}", version=xxhash.VERSION)


def parity(scheme: str) -> Iterator[Finding]:
    """Name the library that computes parity."""
    from ..redundancy.erasure_codes import library

    by = re.sub(r"/\S*/", "", library())
    if by == "numpy" and parse(scheme).parity:
        yield warning("parity", "computed by numpy",
                      "install libisal2 of your distribution: ISA-L is several times as fast")  # fmt: skip
    else:
        yield fine("parity", "computed by {library}" + f"; {scheme} has no parity" * (not parse(scheme).parity),
                   library=by)  # fmt: skip


def compression(method: str) -> Iterator[Finding]:
    """Check whether drained files can be compressed with the configured method."""
    if method not in ("", "gzip"):
        from ..draining.hdf5_files import plugin

        plugin()
    yield fine("compression", f"of drained files: {method or 'none'}")


def threads(world: World, env: Mapping[str, str]) -> Iterator[Finding]:
    """Compare the threads of all ranks of a node with its cores. Collective over the world; for whole nodes."""
    told = env.get("OMP_NUM_THREADS", "").split(",")[0]
    mine = (int(told) if told.isdigit() else None, frozenset(os.sched_getaffinity(0)))
    ranks = [mine] if world.world is None else world.gather(mine, world.node)
    if world.local_rank == 0:
        yield judge_threads(ranks)


def judge_threads(ranks: Sequence[tuple[int | None, frozenset[int]]]) -> Finding:
    """Compare the threads of some ranks with their cores.

    Args:
        ranks: for each rank the value of OMP_NUM_THREADS, if it is set, and the cores that it may run on.
    """
    cores = len(frozenset().union(*(own for _, own in ranks)))
    wanted = sum(len(own) if told is None else told for told, own in ranks)
    text = "{ranks} rank" + "s" * (len(ranks) > 1) + " with {threads} OpenMP threads on {cores} cores"
    values = {"ranks": len(ranks), "threads": wanted, "cores": cores}
    if len(ranks) > cores:
        return warning("threads", text, "start fewer ranks: a rank that waits in MPI keeps a core busy", **values)
    if wanted <= cores:
        return fine("threads", text, **values)
    if any(told is None for told, _ in ranks):
        advice = "export OMP_NUM_THREADS=(cores / ranks): without it, each rank uses all cores that it may run on"
    else:
        advice = ("lower OMP_NUM_THREADS, or ask for more cores with --cpus-per-task, for srun, too (srun does not "
                  "inherit it)")  # fmt: skip
    return warning("threads", text, advice, **values)
