"""The sbatch templates: what is written of one parses, says what it must, and does what its comments say."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from waiting import until

from mlflash.commands.run import run
from mlflash.commands.template import template
from mlflash.templates.choices import TEMPLATES, Asked, Choice, choose
from mlflash.templates.cluster import Cluster, read_nodes
from mlflash.templates.files import texts

REPO = Path(__file__).parents[2]
NAMES = ("array", "megatron", "nemo", "train")
PAGE = (REPO / "docs" / "slurm.md").read_text()

SINFO = "".join(f"gpu*|2-00:00:00|1-128|96|gpu:h100:8(S:0-1)|n{number}\n" for number in range(200))
CLUSTER = Cluster(read_nodes(SINFO)[0], "proj42", "Open MPI v5.0.11", frozenset({"pmi2", "pmix"}))
USR1, TERM = 128 + signal.SIGUSR1, 128 + signal.SIGTERM

# In the place of `mlflash`: notes what it was called with; ends as it is told to, or by a signal as `mlflash run` does.
# A signal does not end it at once: it waits for somebody who opens the FIFO.
MLFLASH = f"""#!{sys.executable}
import os, signal, sys
out, code = os.environ["OUT"], os.environ["CODE"]
signals = {{signal.SIGUSR1, signal.SIGTERM}}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
with open(f"{{out}}/argv", "w") as file:
    file.write("".join(word + "\\0" for word in sys.argv[1:]))
with open(f"{{out}}/pid.new", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"{{out}}/pid.new", f"{{out}}/pid")
if code != "wait":
    sys.exit(int(code))

def note(told):
    with open(f"{{out}}/signals", "a") as file:
        file.write(signal.Signals(told).name.removeprefix("SIG") + "\\n")

told = signal.sigwait(signals)
note(told)
open(f"{{out}}/go").close()
for more in signal.sigpending():
    note(more)
sys.exit(128 + told)
"""
SCONTROL = """#!/bin/bash
echo "$@" >> "$OUT/asked"
"""


def written(name: str, home: str = "/lustre/me", bin: str = "/lustre/me/venv/bin", **more: Any) -> str:
    """What `mlflash template` writes for these arguments, on that cluster."""
    if name in ("megatron", "nemo"):
        words = (
            ("--log", "$directory", "--flash", "$flash") if name == "nemo" else ("--tensor-model-parallel-size", "8")
        )
        more = {"script": f"{home}/pretrain.py", "arguments": words, **more}
        mounts = f"--container-mounts=/dev/shm:/dev/shm,{home}:{home}"
        more = {"srun_args": f"--container-image={home}/it.sqsh {mounts} --no-container-remap-root", **more}
    asked = Asked(name, Path(home), **{"nodes": 8, "directory": f"{home}/run42", **more})
    return texts(asked, {**choose(asked, CLUSTER), "bin": Choice(bin, "")})[f"{name}.sbatch"]


TEXTS = {name: written(name) for name in NAMES}


def directives(name: str) -> dict[str, str]:
    lines = re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", TEXTS[name], re.M)
    assert len(lines) == TEXTS[name].count("\n#SBATCH") == len(dict(lines))
    return dict(lines)


class Started:
    """A template, filled in, that runs with other programs in the place of mlflash and scontrol."""

    def __init__(self, name: str, out: Path, code: object, **environment: str):
        self.out = out
        for program, text in (("mlflash", MLFLASH), ("scontrol", SCONTROL)):
            (out / program).write_text(text)
            (out / program).chmod(0o700)
        os.mkfifo(out / "go")
        script = out / "job.sbatch"
        script.write_text(written(name, str(out), str(out)))
        (out / "train.py").write_text((REPO / "slurm" / TEMPLATES[name].training).read_text())
        slurm = {
            "SLURM_JOB_NUM_NODES": "9",
            "SLURM_JOB_ID": "71",
            "SLURM_ARRAY_JOB_ID": "70",
            "SLURM_ARRAY_TASK_ID": "3",
            "SLURM_JOB_NODELIST": "n[1-5]",
        }
        env = {"PATH": os.environ["PATH"], "OUT": str(out), "CODE": str(code), **slurm, **environment}
        self.process = subprocess.Popen(["bash", script], env=env, stdout=subprocess.PIPE, text=True)

    def wait(self) -> int:
        self.process.communicate(timeout=90)
        return self.process.returncode

    def wait_until_it_runs(self) -> int:
        until((self.out / "pid").exists, "it runs")
        return int((self.out / "pid").read_text())

    def let_it_end(self) -> None:
        """Let it go on after the signal that it waits for."""
        until(lambda: self.noted("signals"), "a signal")
        assert self.process.poll() is None, "it was not waited for"
        (self.out / "go").write_text("")

    def argv(self) -> list[str]:
        return (self.out / "argv").read_text().split("\0")[:-1]

    def noted(self, name: str) -> list[str]:
        path = self.out / name
        return path.read_text().splitlines() if path.exists() else []


def options(argv: list[str]) -> dict[str, object]:
    """Options that `mlflash run` takes these words for; one that it does not have would be part of the training."""
    assert argv[0] == "run"
    params = run.make_context("run", argv[1:]).params
    assert params["argv"][0] == "python"
    return params


@pytest.mark.parametrize("name", NAMES)
def test_mlflash_run_understands_what_it_is_given_and_it_fits_what_slurm_is_told(name: str, tmp_path: Path) -> None:
    started = Started(name, tmp_path, 0)
    assert started.wait() == 0
    found, told, directory = options(started.argv()), directives(name), tmp_path / "run42"
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
