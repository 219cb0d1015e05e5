"""What a shell offers after TAB."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import mlflash
from mlflash.cli import _COMMANDS

BIN = Path(sys.executable).parent
CLEAR = {"MLFLASH_JOB", "PROMPT_COMMAND", "BASH_ENV", "ZDOTDIR", "COLUMNS", "LINES"}


@pytest.fixture
def environment(shm: Path, tmp_path: Path) -> Mapping[str, str]:
    """That of a user with a checkpoint of steps 7 and 12 in memory, and both in the directory."""
    with mlflash.Checkpointer(tmp_path / "drains", job="run42-x", memory=str(shm), redundancy="none", drain_every=1,
                              strict=True) as ckpt:  # fmt: skip
        for step in (7, 12):
            ckpt.save(step, {"w": np.zeros(4)}).wait()
    path = f"{BIN}:{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if name not in CLEAR}
    return {**kept, "PATH": path, "MLFLASH_MEMORY": str(shm), "HOME": str(tmp_path), "TERM": "dumb", "PS1": "$ "}


def offered(environment: Mapping[str, str], *words: str) -> list[str]:
    """What bash is told for these words, the last of them unfinished: value by value."""
    told = {"COMP_WORDS": " ".join(["mlflash", *words]), "COMP_CWORD": str(len(words))}
    done = subprocess.run([BIN / "mlflash"], env={**environment, **told, "_MLFLASH_COMPLETE": "bash_complete"},
                          capture_output=True, text=True, timeout=60, check=True)  # fmt: skip
    assert not done.stderr
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


def test_commands_options_and_what_is_there_are_offered(environment: Mapping[str, str], tmp_path: Path) -> None:
    assert offered(environment, "sta") == ["status"]
    assert offered(environment, "") == list(_COMMANDS)
    assert {"--directory", "--job", "--memory", "--json"} <= {*offered(environment, "status", "--")}
    assert offered(environment, "status", "--job", "r") == ["run42-x"]
    assert offered(environment, "clean", "") == ["run42-x"]
    assert offered(environment, "clean", "run42-x", "") == []
    assert offered(environment, "inspect", "") == ["12", "7"]
    assert offered(environment, "export", "n") == ["newest"]
    assert offered(environment, "inspect", "--from", "") == ["memory", "directory"]
    assert offered(environment, "plan", "--scheme", "rs") == ["rs:6+2", "rs:5+3"]
    nothing = {**environment, "MLFLASH_MEMORY": str(tmp_path / "nowhere")}
    assert offered(nothing, "inspect", "") == [] == offered(nothing, "status", "--job", "")
    assert offered(nothing, "inspect", "--directory", str(tmp_path / "drains"), "1") == ["12"]
    assert offered(nothing, "inspect", "--directory", str(tmp_path / "nowhere"), "1") == []


def test_the_version_stands_alone_on_the_first_line() -> None:
    done = subprocess.run([BIN / "mlflash", "--version"], capture_output=True, text=True, timeout=60, check=True)
    first, second = done.stdout.splitlines()
    assert first == f"mlflash {mlflash.__version__}"
    assert "torch " in second and "mpi4py " in second and "Python 3." in second


def test_each_shell_has_a_script_and_another_one_is_asked_for_its_name(environment: Mapping[str, str]) -> None:
    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([BIN / "mlflash", "completion", *words], env={**environment, "SHELL": "/bin/tcsh"},
                              capture_output=True, text=True, timeout=60)  # fmt: skip

    assert "#compdef mlflash" in call("zsh").stdout and "--command mlflash" in call("fish").stdout
    assert call().returncode == 2 and "which shell? Name one: bash, zsh, fish" in call().stderr
