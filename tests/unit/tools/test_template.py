"""`mlflash template`: what it writes, what it leaves out and says so, and what it refuses."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from mlflash.cli import main
from mlflash.tools import template
from mlflash.tools.run_job import run as run_command
from mlflash.tools.template import TEMPLATES, word_of_shell

REPO = Path(__file__).parents[3]
NAMES = ("array", "megatron", "nemo", "train")
PAGE = (REPO / "docs" / "slurm.md").read_text()


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["template", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def written(folder: Path, *arguments: object) -> tuple[dict[str, str], str]:
    """The #SBATCH lines of train.sbatch, and its text."""
    run("train", "--output", folder, "--force", *arguments)
    text = (folder / "train.sbatch").read_text()
    return dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", text, re.M)), text


def test_without_a_name_the_templates_are_listed_with_a_line_each() -> None:
    lines = run().output.splitlines()
    assert [line.split()[0] for line in lines] == list(TEMPLATES)
    assert {path.stem for path in (REPO / "slurm").glob("*.sbatch")} == set(TEMPLATES)
    assert {path.name for path in (REPO / "slurm").glob("*.py")} == {kind.training for kind in TEMPLATES.values()}


def test_what_is_not_given_is_left_out_and_off_the_cluster_that_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    shown = run("train", "--output", tmp_path / "job")
    lines, text = written(tmp_path / "job")
    assert {"job-name": "train", "nodes": "3", "ntasks-per-node": "1"}.items() <= lines.items()
    assert not {"account", "partition", "time", "gpus-per-node"} & lines.keys()
    assert "# --time is left out: Slurm takes the partition's default time limit.\n" in text
    assert "\n  # --gpus-per-node is left out: the job asks for no GPUs.\n" in text
    assert "--account is left out: Slurm takes your default account\n" in shown.stdout
    assert "there is no sbatch here" in shown.stderr and "--account, --partition, --time\n" in shown.stderr
    assert shown.stdout.endswith(f"written: train.sbatch and train.py; next: sbatch {tmp_path}/job/train.sbatch\n")
    assert (tmp_path / "job" / "train.py").read_text() == (REPO / "slurm" / "train.py").read_text()
    assert f"\ndirectory={tmp_path}/job/train-checkpoints\n" in text
    assert run("train", "-o", tmp_path / "b", "--account", "a", "--partition", "p", "--time", 60).stderr == ""
    (tmp_path / "sbatch").touch(mode=0o755)
    assert run("train", "--output", tmp_path / "c").stderr == "", "Slurm itself says what it requires"


def test_ranks_are_as_many_as_gpus_if_they_are_not_given(tmp_path: Path) -> None:
    lines, text = written(tmp_path, "--gpus-per-node", 4, "--nodes", 8, "--spares", 0, "--job-name", "a.b")
    assert (lines["ntasks-per-node"], lines["gpus-per-node"], lines["nodes"]) == ("4", "4", "8")
    assert "\n  --gpus 4\n" in text and f"\ndirectory={tmp_path}/a.b-checkpoints\n" in text
    assert written(tmp_path, "--gpus-per-node", 4, "--ranks-per-node", 2)[0]["ntasks-per-node"] == "2"


@pytest.mark.parametrize(("arguments", "text"), [
    (["--account", "proj 42"], "--account"), (["--account", "x\n#SBATCH --uid=0"], "--account"),
    (["--account", "-x"], "--account"), (["--partition", "a b"], "--partition"), (["--job-name", "a/b"], "--job-"),
    (["--account", "me; true"], "--account"), (["--time", "soon"], "--time"), (["--time", "6:59"], "7 minutes"),
    (["--directory", "/a\nb"], "--directory"), (["--directory", "s3://a/b"], "a path"), (["--", "a\nb"], "unprintable"),
    (["--srun-args", "--x='"], "--srun-args"), (["--script", "/nowhere.py"], "--script does not exist"),
])  # fmt: skip
def test_what_a_shell_or_slurm_would_misread_is_refused(arguments: list[str], text: str, tmp_path: Path) -> None:
    assert text in run("train", "-o", tmp_path / "job", *arguments, code=2).output
    assert not (tmp_path / "job").exists()
    assert "--script is missing" in run("nemo", "-o", tmp_path / "job", code=2).output


@pytest.mark.parametrize("time", ["7", "7:00", "00:07:00", "0-1", "1-12:30"])
def test_times_are_those_of_sbatch(time: str, tmp_path: Path) -> None:
    assert written(tmp_path, "--time", time)[0]["time"] == time


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    run("train", "--output", tmp_path)
    (tmp_path / "train.py").write_text("mine")
    before = (tmp_path / "train.sbatch").read_text()
    shown = run("array", "--output", tmp_path, code=2).output
    assert "already has train.py" in shown and not (tmp_path / "array.sbatch").exists()
    # One's own training is none of the files.
    assert "written: array.sbatch; next" in run("array", "-o", tmp_path, "--script", tmp_path / "train.py").output
    assert (tmp_path / "train.py").read_text() == "mine" and (tmp_path / "train.sbatch").read_text() == before
    run("train", "--output", tmp_path, "--force", "--time", 30)
    assert (tmp_path / "train.py").read_text() != "mine" and (tmp_path / "train.sbatch").read_text() != before


def test_a_shell_reads_words_and_paths_as_they_were_given(tmp_path: Path) -> None:
    odd = tmp_path / "a 'b' \"c\" $(d) `e` \\ {f}"
    words = ("$directory/x y", "${directory}", '$HOME\'s "$1" `id` $(id) \\', "plain", "", "it's", "a@spares@")
    odd.mkdir()
    (odd / "my.py").touch()
    run("train", "-o", odd, "--script", odd / "my.py", "--", *words)
    body = (odd / "train.sbatch").read_text().partition("\ndirectory=")[2].partition("\nspares=")[0]
    script = f'HOME=/h\ndirectory={body}\nprintf "%s\\0" "$directory" "${{training[@]:1}}"'
    printed = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True).stdout
    directory = f"{odd}/train-checkpoints"
    assert printed.split("\0")[:-1] == [
        directory, f"{odd}/my.py", f"{directory}/x y", directory, "/h's \"$1\" `id` $(id) \\", "plain", "", "it's",
        "a@spares@",
    ]  # fmt: skip
    assert word_of_shell("$5") == "'$5'"


# What the scripts say and do

# In the place of `mlflash`: notes what it was called with.
MLFLASH = """#!/bin/bash
printf '%s\\0' "$@" > "$OUT"
"""


def filled(name: str, folder: Path) -> str:
    """What `mlflash template` writes into a folder for these arguments."""
    options = ["--nodes", 8, "--directory", folder / "run42", "--account", "proj42", "--partition", "gpu",
               "--gpus-per-node", 8, "--time", "2-00:00:00"]  # fmt: skip
    words = {"nemo": ("--log", "$directory", "--flash", "$flash"), "megatron": ("--tensor-model-parallel-size", "8")}
    if name in words:
        (folder / "pretrain.py").touch()
        mounts = f"--container-mounts=/dev/shm:/dev/shm,{folder}:{folder}"
        image = f"--container-image={folder}/it.sqsh {mounts} --no-container-remap-root"
        options += ["--script", folder / "pretrain.py", "--srun-args", image, "--", *words[name]]
    run(name, "--output", folder, *options)
    text = (folder / f"{name}.sbatch").read_text()
    return re.sub(r"^export PATH=.*$", f'export PATH={folder}:"$PATH"', text, flags=re.M)


@pytest.fixture
def text(name: str, tmp_path: Path) -> str:
    return filled(name, tmp_path)


def directives(text: str) -> dict[str, str]:
    lines = re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.M)
    assert len(lines) == text.count("\n#SBATCH") == len(dict(lines))
    return dict(lines)


def argv_of(name: str, folder: Path) -> list[str]:
    """Run a template, filled in, with another program in the place of mlflash: what that was called with."""
    (folder / "mlflash").write_text(MLFLASH)
    (folder / "mlflash").chmod(0o700)
    (folder / "job.sbatch").write_text(filled(name, folder))
    slurm = {"CPUS_ON_NODE": "96", "NTASKS_PER_NODE": "8", "JOB_NUM_NODES": "9", "JOB_ID": "71", "ARRAY_JOB_ID": "70",
             "ARRAY_TASK_ID": "3", "JOB_NODELIST": "n[1-5]"}  # fmt: skip
    env = {"PATH": os.environ["PATH"], "OUT": str(folder / "argv"), **{f"SLURM_{key}": slurm[key] for key in slurm}}
    subprocess.run(["bash", folder / "job.sbatch"], env=env, check=True, timeout=90)
    return (folder / "argv").read_text().split("\0")[:-1]


def options(argv: list[str]) -> dict[str, object]:
    """Options that `mlflash run` takes these words for; one that it does not have would be part of the training."""
    assert argv[0] == "run"
    params = run_command.make_context("run", argv[1:]).params
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
    assert found["argv"][:2] == ("python", f"{tmp_path}/train.py")
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
    there = [option.opts[0] for option in run_command.params if isinstance(option, click.Option)]
    assert table == there
    for option in run_command.params:
        if isinstance(option, click.Option) and option.show_default:
            (row,) = re.findall(rf"^\| `{option.opts[0]}\b.*$", page, re.M)
            assert f"`{option.default}`" in row or f" {option.default:g}" in row, row


def test_the_page_has_every_template_and_every_option_that_they_have() -> None:
    page = section("The first job")
    assert re.findall(r"^\| \[`(\w+)`\]\(\.\./slurm/\w+\.sbatch\)", page, re.M) == list(TEMPLATES)
    rows = [row.partition(" | ")[0] for row in re.findall(r"^\| `--.*$", page, re.M)]
    there = {option.opts[0] for option in template.template.params if isinstance(option, click.Option)}
    assert {*re.findall(r"`(--[\w-]+)`", "".join(rows))} == there - {"--output", "--force"}
    assert "`--output`" in page and "`--force`" in page


def test_the_page_has_every_event_of_the_journal_and_its_fields() -> None:
    trees = [ast.parse((REPO / "mlflash" / "run" / f"{name}.py").read_text())
             for name in ("supervisor", "first_node_guard")]  # fmt: skip
    calls = [node for tree in trees for node in ast.walk(tree)
             if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".note")]  # fmt: skip
    assert len(calls) > 4
    for call in calls:
        (row,) = re.findall(rf"^\| `{ast.literal_eval(call.args[0])}` .*$", PAGE, re.M)
        for keyword in call.keywords:
            assert keyword.arg is None or f"`{keyword.arg}`" in row, (keyword.arg, row)
