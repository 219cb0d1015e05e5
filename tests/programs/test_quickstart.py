"""The commands of docs/quickstart.md, as they stand, in an empty directory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import plain_environment

REPO = Path(__file__).parents[2]
PAGE = (REPO / "docs" / "quickstart.md").read_text()


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def commands(title: str) -> list[str]:
    return [
        line for block in re.findall(r"^```sh\n(.*?)^```", section(title), re.M | re.S) for line in block.splitlines()
    ]


def test_on_a_laptop_it_is_killed_loses_a_node_and_goes_on(shm: Path, tmp_path: Path) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", section("A training job"), re.M | re.S)
    (tmp_path / "train.py").write_text(block)
    lines = commands("On a laptop")
    typed = [line for line in (*commands("Install"), *lines) if not line.startswith("#")]
    assert len(typed) == 15, "as the page says"
    assert sum("/dev/shm" in line for line in lines) == 2
    script = "\n".join(["set -ex", *lines]).replace("/dev/shm", str(shm))
    environment = plain_environment(MLFLASH_MEMORY=shm) | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, timeout=110, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    begins = [int(step) for step in re.findall(r"begins after step (\d+)", done.stdout)]
    (left, again) = re.findall(r"in memory: step (\d+) of 4 ranks", done.stdout)
    assert begins == [int(left)] and left == again and int(left) >= 55, done.stdout
    assert "survives the loss of: any process; any 1 of 4 nodes" in done.stdout and "step 300" in done.stdout
    assert "quickstart: " in done.stdout and "freed" in done.stdout and not list(shm.glob("node*/mlflash-*/quickstart"))
    assert "begins after step 0" in (tmp_path / "first.log").read_text()


@pytest.mark.gate
def test_each_page_that_installs_mlflash_has_the_command_of_one_page_or_links_to_it() -> None:
    (install, *_) = re.findall(r"^pip install .*", (REPO / "docs" / "install.md").read_text(), re.M)
    assert commands("Install")[-1] == install and install in (REPO / "README.md").read_text()
    others = [page for page in (REPO / "docs").glob("*.md") if page.stem not in ("install", "quickstart")]
    assert not [page.name for page in others if re.search(r"pip install [^\n]*(mlflash|'\.)", page.read_text())]
