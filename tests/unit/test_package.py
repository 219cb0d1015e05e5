"""What importing does (nothing), who imports whom, and what is installed."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import mlflash
from mlflash import config, errors

REPO = Path(__file__).parents[2]

# The way of the data: each module imports only from those before it.
ORDER = [
    "version", "errors", "points", "skeleton", "store", "scheme", "config", "dtypes", "plain", "state", "flatten",
    "torch_objects", "rebuild", "layout", "manifest", "header", "host_list", "domains", "slurm_topology", "topology",
    "placement", "survival", "sharing", "erasure", "stripes", "limits", "user_directory", "node_memory", "pulse",
    "events", "metrics", "journal", "inventory", "evidence", "crew", "huge_pages", "segment",
    "slot", "parity_file", "moves", "pings", "waits", "comm", "stock", "board", "window", "pace", "transfer", "aside",
    "exchange", "devices", "spots", "lazy", "ways", "stage", "shelf", "room", "aheads", "begun",
    "copies", "parity", "protect", "replicas", "parts",
    "snapshot", "commit", "repair", "fetch", "reunion", "shards", "parcels", "opened", "reshard", "restore",
    "courier", "drains", "scavenge", "saves", "loading", "newest", "restores", "rng", "report", "adapting", "off",
    "at_exit", "checkpointer", "__init__", "cli", "__main__",
]  # fmt: skip
# The same of `draining`, which stands before "drains".
DRAINING = ["__init__", "index", "catalog", "dealing", "hdf5", "cargo", "form", "as_hdf5", "as_dcp", "drain", "drained"]
MAY_IMPORT_MPI = {"comm"}


def imports(path: Path) -> tuple[set[str], set[str]]:
    """Modules of mlflash, and other top-level packages, that a file imports anywhere."""
    ours, others = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            ours |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            others.add(node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            others |= {alias.name.split(".")[0] for alias in node.names}
    return ours, others


def test_each_module_imports_only_from_those_before_it() -> None:
    modules = {path.stem: path for path in (REPO / "mlflash").glob("*.py")}
    assert sorted(modules) == sorted(ORDER), "a new module has to find its place in the order"
    for index, name in enumerate(ORDER):
        ours, others = imports(modules[name])
        wrong = ours & set(ORDER) - set(ORDER[:index])
        assert not wrong, f"{name} imports {wrong}"
        assert "mpi4py" not in others or name in MAY_IMPORT_MPI, f"{name} imports mpi4py"


def test_what_drains_imports_only_from_what_is_before_it() -> None:
    modules = {path.stem: path for path in (REPO / "mlflash" / "draining").glob("*.py")}
    assert sorted(modules) == sorted(DRAINING)
    for index, name in enumerate(DRAINING):
        ours, _ = imports(modules[name])
        assert not ours & set(DRAINING) - set(DRAINING[:index]), f"{name} imports what is behind it"
        assert not ours & set(ORDER[ORDER.index("drains") :]), f"{name} imports what is behind draining"


def test_importing_does_nothing() -> None:
    program = """
import logging, os, sys, threading
before = set(os.listdir("/dev/shm"))
import mlflash, mlflash.adapters
assert "torch" not in sys.modules and "mpi4py.MPI" not in sys.modules and "h5py" not in sys.modules
assert not logging.getLogger().handlers and not logging.getLogger("mlflash").handlers
assert threading.active_count() == 1
assert not [n for n in set(os.listdir("/dev/shm")) - before if "mlflash" in n and "test" not in n]
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60, cwd="/")


def test_the_public_surface_is_one_table() -> None:
    assert mlflash.__all__ == ["Checkpointer", "Snapshot", "__version__", "errors", "rng"]
    assert importlib.metadata.version("mlflash") == mlflash.__version__


def test_the_tests_import_the_installed_package() -> None:
    spec = importlib.util.find_spec("mlflash.adapters")
    assert spec is not None and spec.origin is not None
    distribution = importlib.metadata.distribution("mlflash")
    assert distribution.locate_file("") is not None
    assert str(REPO) not in sys.path and "" not in sys.path, "the checkout must not be importable by accident"


def test_each_public_error_has_a_sentence_and_travels_between_processes() -> None:
    import pickle

    for name in errors.__all__:
        kind = getattr(errors, name)
        assert kind.__doc__ and kind.__doc__.strip().endswith(".")
        error = kind("what", rank=3, node="n1", step=7, tensor="a.b", expected="x", found="y", ranks=[1], nodes=["n0"])
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind and str(again) == str(error)
        assert (again.rank, again.node, again.step, again.tensor, again.ranks) == (3, "n1", 7, "a.b", (1,))
        for part in ("rank 3 on n1", "step 7", "'a.b'", "expected: x", "found:    y"):
            assert part in str(error)


def test_job_names() -> None:
    name = config.job_name
    digest = name({}, "/lustre/me/run42").removeprefix("run42-")
    assert len(digest) == 8
    assert name({"SLURM_JOB_ID": "71"}, "/lustre/me/run42") == f"slurm-71-{digest}"
    assert name({"SLURM_JOB_ID": "71"}, None) == "slurm-71"
    assert name({"SLURM_JOB_ID": "71"}, "/a") != name({"SLURM_JOB_ID": "71"}, "/b")
    assert config.from_environment({"MLFLASH_JOB": "env", "SLURM_JOB_ID": "7"}, "/a").job == "env"
    assert config.from_environment({"MLFLASH_JOB": "env"}, "/a", job="given").job == "given"
    with pytest.raises(errors.ConfigError, match="no name"):
        name({}, None)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"redundancy": "raid"}, "none, copy, copy:k, xor:n"),
        ({"timeout_s": 0}, "above 0"),
        ({"chunk_nbytes": 3_000_000}, "a multiple of block_nbytes"),
        ({"memory": "shm"}, "an absolute path"),
        ({"job": "../x"}, "used as a directory name"),
        ({"when_busy": "panic"}, "MLFLASH_WHEN_BUSY"),
        ({"color": "red"}, "unknown settings: color"),
    ],
)
def test_a_bad_setting_is_named_with_what_is_allowed(settings: dict[str, object], text: str) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        config.from_environment({}, "/a", **settings)
    assert text in str(caught.value)


def test_the_environment_is_read_and_checked() -> None:
    found = config.from_environment({"MLFLASH_TIMEOUT_S": "7.5", "MLFLASH_STRICT": "1", "MLFLASH_RESERVE": "10"}, "/a")
    assert (found.timeout_s, found.strict, found.reserve) == (7.5, True, 10)
    assert config.from_environment({"MLFLASH_TIMEOUT_S": "7.5"}, "/a", timeout_s=3.0).timeout_s == 3.0
    with pytest.raises(errors.ConfigError, match="MLFLASH_STRICT"):
        config.from_environment({"MLFLASH_STRICT": "maybe"}, "/a")
