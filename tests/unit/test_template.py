"""`mlflash template`: what it is given, what Slurm says of itself, what neither says, and what it refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mlflash.cli import main
from mlflash.errors import ConfigError
from mlflash.templates.choices import TEMPLATES, Asked, Choice, choose, word_of_shell
from mlflash.templates.cluster import Cluster, Kind, read_gpus, read_mpi, read_nodes, seconds

REPO = Path(__file__).parents[2]

# As sinfo of a site prints it: a default partition of CPUs, one of two kinds of GPU nodes, one for short jobs.
SINFO = """\
cpu*|infinite|1-infinite|64|(null)|c0
cpu*|infinite|1-infinite|64|(null)|c1
gpu|2-00:00:00|1-3|96|gpu:h100:8(S:0-1),shard:64|g0
gpu|2-00:00:00|1-3|96|gpu:h100:8(S:0-1),shard:64|g1
gpu|2-00:00:00|1-3|96|gpu:h100:8(S:0-1),shard:64|g2
gpu|2-00:00:00|1-3|96|gpu:h100:8(S:0-1),shard:64|g3
gpu|2-00:00:00|1-3|32|gpu:a100:4|g4
gpu|2-00:00:00|1-3|32|(null)|g5
debug|5:00|1|32|gpu:a100:4|g4
"""
LISTED = "MPI plugin types are...\n\tpmix\n\tnone\n\tpmi2\nspecific pmix plugin versions available: pmix_v4\n"
# Slurm, as far as the command asks it.
PROGRAMS = {
    "sinfo": f"cat << 'END'\n{SINFO}END",
    "srun": f"cat << 'END'\n{LISTED}END",
    "sacctmgr": "echo proj42",
    "scontrol": 'echo "NodeName=c0 Arch=x86_64 CPUEfctv=62 CPUTot=64"; echo "NodeName=g0 Arch=x86_64 CPUTot=96"',
}
PARTITIONS, FIRST = read_nodes(SINFO)
CLUSTER = Cluster(PARTITIONS, "proj42", "MPICH 5.0.2", read_mpi(LISTED), {Kind(64, 0): 62})
NOTHING = Cluster({}, "", "", frozenset())


def chosen(cluster: Cluster = CLUSTER, template: str = "train", **more: Any) -> dict[str, Choice]:
    return choose(Asked(template, Path("/lustre/me"), **more), cluster)


def values(*names: str, cluster: Cluster = CLUSTER, **more: Any) -> list[str | None]:
    found = chosen(cluster, **more)
    return [found[name].value for name in names]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to write into, on a machine with that Slurm."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "job"


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["template", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_without_a_name_the_templates_are_listed_with_a_line_each() -> None:
    lines = run().output.splitlines()
    assert [line.split()[0] for line in lines] == list(TEMPLATES)
    assert {path.stem for path in (REPO / "slurm").glob("*.sbatch")} == set(TEMPLATES)
    assert {path.name for path in (REPO / "slurm").glob("*.py")} == {kind.training for kind in TEMPLATES.values()}


def test_what_is_not_given_is_what_the_cluster_says_and_what_neither_says_is_left_out(site: Path) -> None:
    shown = run("train", "--output", site, "--job-name", "a.b").output
    text = (site / "train.sbatch").read_text()
    found = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", text, re.M))
    assert {"account": "proj42", "partition": "cpu", "job-name": "a.b", "nodes": "2", "ntasks-per-node": "1",
            "cpus-per-task": "62"}.items() <= found.items()  # fmt: skip
    assert not {"time", "gpus-per-node"} & found.keys()
    assert "# --time is left out: it was not given, and partition cpu has no limit.\n" in text
    assert "\n  # --gpus is left out: the nodes of partition cpu have none.\n" in text
    for line in ("account         proj42 (your default account)", "partition       cpu (Slurm's default)",
                 "job-name        a.b (given)", "cpus-per-task   62 (the nodes of partition cpu have 62 CPUs)",
                 "time            left out: it was not given, and partition cpu has no limit"):  # fmt: skip
        assert f"{line}\n" in shown, shown
    assert shown.endswith(f"written: train.sbatch and train.py; next: sbatch {site}/train.sbatch\n")
    assert (site / "train.py").read_text() == (REPO / "slurm" / "train.py").read_text()
    assert f"\ndirectory={site}/a.b-checkpoints\n" in text


def test_where_there_is_no_slurm_only_what_is_given_is_written() -> None:
    left = ("account", "partition", "nodes", "gpus-per-node", "cpus-per-task", "time", "mpi", "srun-args")
    found = chosen(NOTHING)
    assert [name for name in left if found[name].value is not None] == []
    assert found["spares"].value == "0" and found["ranks-per-node"].value == "1"
    assert values("nodes", "spares", "gpus-per-node", "ranks-per-node", cluster=NOTHING, nodes=8,
                  gpus_per_node=4) == ["9", "1", "4", "4"]  # fmt: skip


def test_nodes_ranks_gpus_and_cores_fit_each_other_and_the_partition() -> None:
    sizes = ("nodes", "spares", "ranks-per-node", "gpus-per-node", "cpus-per-task")
    assert values(*sizes, partition="gpu") == ["3", "1", "8", "8", "12"]  # the most frequent kind; 3 nodes at most
    assert values(*sizes, partition="gpu", nodes=3) == ["3", "0", "8", "8", "12"]
    assert values(*sizes, partition="gpu", ranks_per_node=2) == ["3", "1", "2", "2", "48"]
    assert values(*sizes, partition="gpu", gpus_per_node=4, ranks_per_node=4) == ["3", "1", "4", "4", "24"]
    assert values(*sizes, nodes=1, spares=0) == ["1", "0", "1", None, "62"]
    assert values("time", "partition", partition="gpu,cpu") == ["2-00:00:00", "gpu,cpu"]
    assert PARTITIONS["gpu"].kinds == {Kind(96, 8): 4, Kind(32, 4): 1, Kind(32, 0): 1} and FIRST[Kind(96, 8)] == "g0"


@pytest.mark.parametrize(("library", "flag"), [
    ("MPICH 5.0.2", "pmi2"), ("Open MPI v5.0.11", "pmix"), ("Intel MPI Library 2021.13", "pmi2"),
    ("CRAY MPICH 8.1.27", None), ("", None),
])  # fmt: skip
def test_the_flag_of_srun_is_that_of_the_mpi_which_mpi4py_loads_where_this_slurm_has_it(
    library: str, flag: str | None
) -> None:
    assert values("mpi", cluster=Cluster(PARTITIONS, "", library, read_mpi(LISTED))) == [flag]


@pytest.mark.parametrize(("asked", "text"), [
    ({"account": "proj 42"}, "--account"), ({"account": "x\n#SBATCH --uid=0"}, "--account"),
    ({"account": "-x"}, "--account"), ({"partition": "a b"}, "--partition"), ({"partition": "cpu,"}, "--partition"),
    ({"partition": "none"}, "no partition none"), ({"job_name": "a/b"}, "--job-name"), ({"job_name": "a'b"}, "--job-"),
    ({"mpi": "pmi2; true"}, "--mpi"), ({"mpi": "pmi3"}, "no --mpi=pmi3"),
    ({"time": "soon"}, "--time"), ({"time": "5"}, "too short"), ({"time": "0"}, "too short"),
    ({"partition": "gpu", "time": "3-0"}, "at most 2-00:00:00"), ({"partition": "debug"}, "too short"),
    ({"nodes": 3}, "partition cpu gives a job fewer"), ({"partition": "gpu", "nodes": 3, "spares": 1}, "fewer nodes"),
    ({"ranks_per_node": 63}, "more than the CPUs"), ({"gpus_per_node": 1}, "--gpus-per-node"),
    ({"directory": "/a\nb"}, "--directory"), ({"directory": "s3://a/b"}, "a path"), ({"arguments": ("a\nb",)}, "argu"),
    ({"srun_args": "--x='"}, "--srun-args"), ({"script": "/nowhere.py"}, "--script does not exist"),
    ({"template": "megatron"}, "--script is missing"), ({"template": "nemo"}, "--script is missing"),
])  # fmt: skip
def test_what_slurm_would_refuse_or_a_shell_misread_is_refused(asked: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        chosen(**asked)


def test_what_is_refused_is_a_wrong_call_and_writes_nothing(site: Path) -> None:
    assert "no partition none" in run("train", "-o", site, "--partition", "none", code=2).output
    assert not site.exists()


def test_nothing_is_overwritten_without_force(site: Path) -> None:
    run("train", "--output", site)
    (site / "train.py").write_text("mine")
    before = (site / "train.sbatch").read_text()
    told = run("array", "--output", site, code=2).output
    assert "already has train.py" in told and not (site / "array.sbatch").exists()
    assert "already has train.sbatch and train.py" in run("train", "-o", site, "--time", 30, code=2).output
    # One's own training is none of the files.
    assert "written: array.sbatch; next" in run("array", "-o", site, "--script", site / "train.py").output
    assert (site / "train.py").read_text() == "mine" and (site / "train.sbatch").read_text() == before
    run("train", "--output", site, "--force", "--time", 30)
    assert (site / "train.py").read_text() != "mine" and (site / "train.sbatch").read_text() != before


def test_a_shell_reads_words_and_paths_as_they_were_given(tmp_path: Path) -> None:
    odd = tmp_path / "a 'b' \"c\" $(d) `e` \\ {f}"
    words = ("$directory/x y", "${directory}", '$HOME\'s "$1" `id` $(id) \\', "plain", "", "it's", "a@spares@")
    odd.mkdir()
    (odd / "my.py").touch()
    found = choose(Asked("array", odd, script=str(odd / "my.py"), arguments=words), NOTHING)
    text = {name: choice.value for name, choice in found.items()}
    script = f"directory={text['directory']}\nbin={text['bin']}\nHOME=/h\n"
    script += f"printf '%s\\0' \"$directory\" {text['script']} {text['arguments']}"
    printed = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True).stdout
    directory = f"{odd}/array-checkpoints"
    assert printed.split("\0")[:-1] == [
        directory, f"{odd}/my.py", f"{directory}/x y", directory, "/h's \"$1\" `id` $(id) \\", "plain", "", "it's",
        "a@spares@",
    ]  # fmt: skip
    assert word_of_shell("$5") == "'$5'"


@pytest.mark.parametrize(("text", "expected"), [
    ("90", 5400), ("7:30", 450), ("01:00:00", 3600), ("1-0", 86400), ("1-12:30", 131400), ("2-00:00:10", 172810),
    ("x", None), ("1:2:3:4", None), ("", None), ("UNLIMITED", None), ("-5", None),
])  # fmt: skip
def test_times_are_those_of_sbatch(text: str, expected: int | None) -> None:
    assert seconds(text) == expected


def test_what_slurm_prints_is_read() -> None:
    assert [read_gpus(text) for text in ("(null)", "gpu:8", "gpu", "gpu:1g.5gb:7,gpu:a100:2(S:0,1)", "shard:8")] == [
        0, 8, 1, 9, 0]  # fmt: skip
    assert read_mpi(LISTED) == {"pmix", "none", "pmi2", "pmix_v4"}
    assert read_mpi("srun: MPI types are...\nsrun: none\nsrun: pmi2\n") == {"none", "pmi2"}
    assert read_mpi("") == frozenset() and read_nodes("slurm: no such thing\n") == ({}, {})


def test_the_mpi_is_found_without_starting_it(site: Path) -> None:
    shown = run("train", "--output", site).output
    (line,) = re.findall(r"^mpi +(.*)$", shown, re.M)
    assert re.fullmatch(r"pmi2 \(needed by MPICH .*\)|pmix \(needed by Open MPI .*\)", line), line
    assert Path(sys.executable).parent == Path(re.findall(r"^bin +(\S+) ", shown, re.M)[0].split(":")[0])
