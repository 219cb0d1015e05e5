"""The sbatch templates: what is written of one parses, says what it must, and does what its comments say."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mlflash.commands.run import run
from mlflash.commands.template import TEMPLATES, template

REPO = Path(__file__).parents[2]
NAMES = ("array", "megatron", "nemo", "train")
PAGE = (REPO / "docs" / "slurm.md").read_text()

# In the place of `mlflash`: notes what it was called with.
MLFLASH = """#!/bin/bash
printf '%s\\0' "$@" > "$OUT"
"""


def written(name: str, folder: Path) -> str:
    """What `mlflash template` writes into a folder for these arguments."""
    options = ["--nodes", 8, "--directory", folder / "run42", "--account", "proj42", "--partition", "gpu",
               "--gpus-per-node", 8, "--time", "2-00:00:00", "--mpi", "pmix"]  # fmt: skip
    words = {"nemo": ("--log", "$directory", "--flash", "$flash"), "megatron": ("--tensor-model-parallel-size", "8")}
    if name in words:
        (folder / "pretrain.py").touch()
        mounts = f"--container-mounts=/dev/shm:/dev/shm,{folder}:{folder}"
        image = f"--container-image={folder}/it.sqsh {mounts} --no-container-remap-root"
        options += ["--script", folder / "pretrain.py", "--srun-args", image, "--", *words[name]]
    done = CliRunner().invoke(template, [name, "--output", str(folder), *map(str, options)])
    assert done.exit_code == 0, done.output
    text = (folder / f"{name}.sbatch").read_text()
    return re.sub(r"^export PATH=.*$", f'export PATH={folder}:"$PATH"', text, flags=re.M)


@pytest.fixture
def text(name: str, tmp_path: Path) -> str:
    return written(name, tmp_path)


def directives(text: str) -> dict[str, str]:
    lines = re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.M)
    assert len(lines) == text.count("\n#SBATCH") == len(dict(lines))
    return dict(lines)


def argv_of(name: str, folder: Path) -> list[str]:
    """Run a template, filled in, with another program in the place of mlflash: what that was called with."""
    (folder / "mlflash").write_text(MLFLASH)
    (folder / "mlflash").chmod(0o700)
    (folder / "job.sbatch").write_text(written(name, folder))
    slurm = {"CPUS_ON_NODE": "96", "NTASKS_PER_NODE": "8", "JOB_NUM_NODES": "9", "JOB_ID": "71", "ARRAY_JOB_ID": "70",
             "ARRAY_TASK_ID": "3", "JOB_NODELIST": "n[1-5]"}  # fmt: skip
    env = {"PATH": os.environ["PATH"], "OUT": str(folder / "argv"), **{f"SLURM_{key}": slurm[key] for key in slurm}}
    subprocess.run(["bash", folder / "job.sbatch"], env=env, check=True, timeout=90)
    return (folder / "argv").read_text().split("\0")[:-1]


def options(argv: list[str]) -> dict[str, object]:
    """Options that `mlflash run` takes these words for; one that it does not have would be part of the training."""
    assert argv[0] == "run"
    params = run.make_context("run", argv[1:]).params
    assert params["argv"][0] == "python"
    return params


@pytest.mark.parametrize("name", NAMES)
def test_slurm_is_told_what_a_job_with_spares_needs(name: str, text: str) -> None:
    assert not re.search(r"@[\w-]+@", text)
    found = directives(text)
    assert {"no-kill": "", "requeue": "", "open-mode": "append", "exclusive": "", "mem": "0"}.items() <= found.items()
    assert found["signal"] == ("B:USR2@300" if name == "nemo" else "B:USR1@300") and "USR2" in text
    assert {"account", "partition", "nodes", "ntasks-per-node", "gpus-per-node", "time"} <= set(found)
    assert ("array" in found) == (name == "array")
    first_command = re.search(r"^[^#\s]", text, re.M)
    assert first_command and "#SBATCH" not in text[first_command.start() :], "sbatch reads none after a command"


@pytest.mark.parametrize("name", NAMES)
def test_mlflash_run_understands_what_it_is_given_and_it_fits_what_slurm_is_told(name: str, tmp_path: Path) -> None:
    found, told = options(argv_of(name, tmp_path)), directives((tmp_path / "job.sbatch").read_text())
    directory = tmp_path / "run42"
    directory = directory / "3" if name == "array" else directory
    assert directory.is_dir() and found["run_log"] == directory / "run.jsonl" and str(directory) in found["argv"]
    assert found["nodes"] + found["spares"] == int(told["nodes"]) and found["spares"] == 1
    assert found["gpus"] == int(told["gpus-per-node"]) == int(told["ntasks-per-node"])
    assert found["argv"][:3] == ("python", "-m", "mpi4py") and found["mpi"] == "pmix"
    assert found["argv"][3] == f"{tmp_path}/train.py"
    assert found["directory"] == str(directory / "mlflash" if name in ("nemo", "megatron") else directory)
    assert found["grace"] < int(told["signal"].rpartition("@")[2]) / 2
    if name in ("nemo", "megatron"):
        mounts = f"--container-mounts=/dev/shm:/dev/shm,{tmp_path}:{tmp_path}"
        assert found["srun_args"].split()[1:] == [mounts, "--no-container-remap-root"]


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_page_has_every_option_of_mlflash_run_and_no_other() -> None:
    page = section("Options")
    table = re.findall(r"^\| `(--[\w-]+)", page, re.M)
    there = [option.opts[0] for option in run.params if isinstance(option, click.Option)]
    assert table == there
    for option in run.params:
        if isinstance(option, click.Option) and option.show_default:
            (row,) = re.findall(rf"^\| `{option.opts[0]}\b.*$", page, re.M)
            assert f"`{option.default}`" in row or f" {option.default:g}" in row, row


def test_the_page_has_every_template_and_every_option_that_they_have() -> None:
    page = section("The first job")
    assert re.findall(r"^\| \[`(\w+)`\]\(\.\./slurm/\w+\.sbatch\)", page, re.M) == list(TEMPLATES)
    rows = [row.partition(" | ")[0] for row in re.findall(r"^\| `--.*$", page, re.M)]
    there = {option.opts[0] for option in template.params if isinstance(option, click.Option)}
    assert {*re.findall(r"`(--[\w-]+)`", "".join(rows))} == there - {"--output", "--force"}
    assert "`--output`" in page and "`--force`" in page


def test_the_page_has_every_event_of_the_journal_and_its_fields() -> None:
    trees = [ast.parse((REPO / "mlflash" / "launcher" / f"{name}.py").read_text())
             for name in ("supervisor", "first_node_guard")]  # fmt: skip
    calls = [node for tree in trees for node in ast.walk(tree)
             if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".note")]  # fmt: skip
    assert len(calls) > 4
    for call in calls:
        (row,) = re.findall(rf"^\| `{ast.literal_eval(call.args[0])}` .*$", PAGE, re.M)
        for keyword in call.keywords:
            assert keyword.arg is None or f"`{keyword.arg}`" in row, (keyword.arg, row)
