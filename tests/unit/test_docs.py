"""Every Python block in README.md and docs/ runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
OTHER_PAGES = [REPO / name for name in ("ARCHITECTURE.md", "CHANGES.md", "CONTRIBUTING.md")]
# Their scripts are whole trainings: tests/frameworks/test_docs.py.
FRAMEWORKS = {"lightning", "transformers", "deepspeed", "torchtitan", "nemo"}
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    if page.stem not in FRAMEWORKS
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_the_block_runs(block: str, shm: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI", "SLURM"))}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", block],
        env={**environment, "MLFLASH_MEMORY": str(shm)},
        cwd=shm,
        timeout=100,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_table_of_modules_is_complete() -> None:
    text = (REPO / "ARCHITECTURE.md").read_text()
    cells = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", text, re.M)
    named = {name for cell in cells for name in re.findall(r"\w+", cell)}
    modules = {path.stem for path in (REPO / "mlflash").glob("*.py")}
    assert named == modules - {"__init__", "__main__", "cli", "version"}
    assert len(text.splitlines()) < 150


def test_every_test_that_the_guarantees_name_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (REPO / "docs" / "guarantees.md").read_text()))
    there = {
        name for path in (REPO / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert len(named) > 30 and named <= there, named - there
