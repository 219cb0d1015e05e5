"""`mlflash template`: what it writes, what it leaves out and says so, and what it refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import needs
import pytest
from click.testing import CliRunner, Result

from mlflash.cli import main
from mlflash.commands import template
from mlflash.commands.template import TEMPLATES, word_of_shell

REPO = Path(__file__).parents[2]
find_mpi = template._mpi


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["template", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result


@pytest.fixture(autouse=True)
def mpi_is_mpich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "_mpi", lambda: "pmi2")


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
    assert f"\ndirectory={tmp_path}/job/train-checkpoints\n" in text and "\n  --mpi pmi2\n" in text
    assert run("train", "-o", tmp_path / "b", "--account", "a", "--partition", "p", "--time", 60).stderr == ""
    (tmp_path / "sbatch").touch(mode=0o755)
    assert run("train", "--output", tmp_path / "c").stderr == "", "Slurm itself says what it requires"


def test_ranks_are_as_many_as_gpus_if_they_are_not_given(tmp_path: Path) -> None:
    lines, text = written(tmp_path, "--gpus-per-node", 4, "--nodes", 8, "--spares", 0, "--job-name", "a.b")
    assert (lines["ntasks-per-node"], lines["gpus-per-node"], lines["nodes"]) == ("4", "4", "8")
    assert "\n  --gpus 4\n" in text and f"\ndirectory={tmp_path}/a.b-checkpoints\n" in text
    assert written(tmp_path, "--gpus-per-node", 4, "--ranks-per-node", 2)[0]["ntasks-per-node"] == "2"


@needs.MPI
def test_the_mpi_is_that_which_mpi4py_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    vendor = subprocess.run([sys.executable, "-c", "from mpi4py import MPI; print(MPI.get_vendor()[0])"],
                            capture_output=True, text=True, check=True).stdout.strip()  # fmt: skip
    assert find_mpi() == {"MPICH": "pmi2", "Open MPI": "pmix"}[vendor]
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nowhere/libmpi.so")
    assert find_mpi() is None


@pytest.mark.parametrize(("arguments", "text"), [
    (["--account", "proj 42"], "--account"), (["--account", "x\n#SBATCH --uid=0"], "--account"),
    (["--account", "-x"], "--account"), (["--partition", "a b"], "--partition"), (["--job-name", "a/b"], "--job-"),
    (["--mpi", "pmi2; true"], "--mpi"), (["--time", "soon"], "--time"), (["--time", "6:59"], "7 minutes"),
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
    script = f'HOME=/h\ndirectory={body}\nprintf "%s\\0" "$directory" "${{training[@]:3}}"'
    printed = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True).stdout
    directory = f"{odd}/train-checkpoints"
    assert printed.split("\0")[:-1] == [
        directory, f"{odd}/my.py", f"{directory}/x y", directory, "/h's \"$1\" `id` $(id) \\", "plain", "", "it's",
        "a@spares@",
    ]  # fmt: skip
    assert word_of_shell("$5") == "'$5'"
