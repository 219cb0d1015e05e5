"""What bash, zsh and fish offer after TAB, in these shells themselves; and that it is there at once."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from waiting import until

import mlflash
from mlflash.cli import _COMMANDS, main

BIN = Path(sys.executable).parent
SHELLS = {"bash": ["--noprofile", "--norc", "-i"], "zsh": ["-f", "-i"]}
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


def test_a_damaged_or_foreign_memory_offers_less_and_says_nothing(environment: Mapping[str, str], shm: Path) -> None:
    job = next(shm.glob("mlflash-*/run42-x"))
    job.chmod(0o755)  # no longer private: mlflash does not use it
    assert offered(environment, "inspect", "") == []
    assert offered(environment, "clean", "") == ["run42-x"]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_at_tab(shell: str, environment: Mapping[str, str], tmp_path: Path) -> None:
    if not shutil.which(shell):
        pytest.skip(f"needs {shell}")
    setup = "autoload -U compinit; compinit -u; " if shell == "zsh" else ""
    with Terminal([shell, *SHELLS[shell]], environment, tmp_path) as terminal:
        terminal.type(f'{setup}eval "$(mlflash completion {shell})"; echo rea"dy"\n')
        terminal.read_until("ready")
        terminal.type("mlflash inspe\t")
        terminal.read_until("ct ")
        terminal.type("--from memory --job r\t")
        terminal.read_until("un42-x ")
        terminal.type("1\t")
        terminal.read_until("2 ")
        terminal.type("\n")
        terminal.read_until("step 12 of 1 rank, from memory")
        terminal.type("mlflash scavenge dr\t")
        terminal.read_until("ains/")


def test_fish_completes_and_shows_what_each_command_does(environment: Mapping[str, str], tmp_path: Path) -> None:
    if not shutil.which("fish"):
        pytest.skip("needs fish")

    def complete(words: str) -> list[str]:
        program = f"mlflash completion fish | source; complete -C '{words}'"
        done = subprocess.run(["fish", "--no-config", "-c", program], env=dict(environment), capture_output=True,
                              text=True, timeout=60, check=True, cwd=tmp_path)  # fmt: skip
        return done.stdout.splitlines()

    assert complete("mlflash st") == [f"status\t{_COMMANDS['status'][1]}"]
    assert sorted(complete("mlflash inspect ")) == ["12\tin memory", "7\tin memory"]


def test_each_command_has_a_line_that_fits_and_a_shell_can_show() -> None:
    for name, (_, line) in _COMMANDS.items():
        assert line.endswith(".") and len(line) <= 62 and "," not in line, name
        command = main.get_command(main.make_context("mlflash", [name]), name)
        assert command is not None and command.name == name and command.help


@pytest.mark.parametrize("words", ["", "inspect ", "export ", "status --job ", "run --", "plan --scheme "])
def test_completing_loads_nothing_heavy(words: str, environment: Mapping[str, str]) -> None:
    program = (
        "import atexit, sys\nfrom mlflash.cli import main\n"
        "heavy = {'torch', 'h5py', 'rich', 'mpi4py.MPI', 'matplotlib', 'fsspec'}\n"
        "atexit.register(lambda: print('heavy:', heavy & sys.modules.keys()))\nmain(prog_name='mlflash')"
    )
    told = {"COMP_WORDS": f"mlflash {words}", "COMP_CWORD": str(len(words.split(" "))),
            "_MLFLASH_COMPLETE": "bash_complete"}  # fmt: skip
    done = subprocess.run([sys.executable, "-c", program], env={**environment, **told}, capture_output=True, text=True,
                          timeout=60, check=True)  # fmt: skip
    assert done.stdout.endswith("heavy: set()\n") and done.stdout.startswith("plain,"), done.stdout


def test_help_and_the_first_tab_load_not_even_numpy() -> None:
    program = "import sys, mlflash.cli\nassert 'numpy' not in sys.modules\nimport mlflash\nassert mlflash.Checkpointer"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd="/")


def test_the_version_stands_alone_on_the_first_line() -> None:
    done = subprocess.run([BIN / "mlflash", "--version"], capture_output=True, text=True, timeout=60, check=True)
    first, second = done.stdout.splitlines()
    assert first == f"mlflash {mlflash.__version__}"
    assert "torch " in second and "mpi4py " in second and "Python 3." in second


def test_a_command_mistyped_is_told_its_name() -> None:
    done = subprocess.run([BIN / "mlflash", "stat"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "No such command 'stat'. Did you mean status?" in done.stderr


def test_without_a_shell_it_is_the_one_that_runs() -> None:
    def call(shell: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([BIN / "mlflash", "completion"], env={**os.environ, "SHELL": shell}, capture_output=True,
                              text=True, timeout=60)  # fmt: skip

    assert "#compdef mlflash" in call("/usr/bin/zsh").stdout
    assert call("/bin/tcsh").returncode == 2 and "which shell? Name one: bash, zsh, fish" in call("/bin/tcsh").stderr


class Terminal:
    """A shell at a terminal, as a user has it."""

    def __init__(self, command: list[str], environment: Mapping[str, str], cwd: Path):
        self.text = ""
        self.fd, theirs = pty.openpty()
        self._process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=dict(environment),
                                         cwd=cwd, start_new_session=True)  # fmt: skip
        os.close(theirs)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self.fd)

    def type(self, text: str) -> None:
        """Press keys; what was on the screen before is forgotten."""
        self.text = ""
        os.write(self.fd, text.encode())

    def read_until(self, wanted: str) -> None:
        """Read the screen until it has what is wanted."""
        until(lambda: wanted in self._read(), lambda: f"{wanted!r} in {self.text!r}")

    def _read(self) -> str:
        if select.select([self.fd], [], [], 0)[0]:
            with contextlib.suppress(OSError):
                self.text += os.read(self.fd, 4096).decode(errors="replace")
        return self.text
