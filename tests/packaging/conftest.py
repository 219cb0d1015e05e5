"""What is built of a copy of the project, and environments to install it into; each is made once."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from building import REPO, call

LOCAL = (".git", ".venv*", "build", "*.egg-info", ".reports", ".*_cache", "__pycache__", ".hypothesis")


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tools")
    call(sys.executable, "-m", "venv", path)
    call(path / "bin/pip", "install", "-q", "build")
    return path / "bin"


@pytest.fixture(scope="session")
def checkers(tools: Path) -> Path:
    """The same, with those that check packages."""
    call(tools / "pip", "install", "-q", "twine", "cffconvert", "mypy")
    return tools


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, with what lies about in one that is worked in."""
    path = tmp_path_factory.mktemp("checkout") / "mlflash"
    shutil.copytree(REPO, path, symlinks=True, ignore=shutil.ignore_patterns(*LOCAL))
    for name in (".venv/bin/tool.py", ".reports/unit.xml", "benchmarks/results/raw.json", "tests/__pycache__/x.pyc",
                 ".secret"):  # fmt: skip
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("not for anybody else")
    return path


@pytest.fixture(scope="session")
def built(tools: Path, checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    out = tmp_path_factory.mktemp("dist")
    call(tools / "python", "-m", "build", "-q", "-o", out, checkout)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="session")
def wheel(built: tuple[Path, Path]) -> Path:
    return built[1]


@pytest.fixture(scope="session")
def new_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Make an environment that has what mlflash needs, and not mlflash; returns its folder.

    They are copies of one, by hard links. Programs of such a copy, but for those installed later, start the Python of
    the first; so call ``bin/python -m``.
    """
    first = tmp_path_factory.mktemp("first")
    call(sys.executable, "-m", "venv", first)
    pip = [first / "bin/python", "-m", "pip"]
    call(*pip, "install", "-q", "--no-compile", "-c", REPO / "constraints.txt", wheel)
    assert "No broken requirements" in call(*pip, "check")
    call(*pip, "uninstall", "-q", "-y", "mlflash")
    call(first / "bin/python", "-c", "import h5py, rich")  # compiled once

    def make() -> Path:
        path = tmp_path_factory.mktemp("environment") / "venv"
        shutil.copytree(first, path, symlinks=True, copy_function=os.link)
        return path

    return make


@pytest.fixture(scope="session")
def plain_environment(new_environment: Callable[[], Path], wheel: Path) -> Path:
    path = new_environment()
    call(path / "bin/python", "-m", "pip", "install", "-q", wheel)
    return path


@pytest.fixture(scope="session")
def torch_environment(new_environment: Callable[[], Path], wheel: Path) -> Path:
    """One with mlflash and PyTorch."""
    path = new_environment()
    call(path / "bin/python", "-m", "pip", "install", "-q", "--no-compile", "-c", REPO / "constraints.txt",
         f"{wheel}[torch]", timeout=380)  # fmt: skip
    return path
