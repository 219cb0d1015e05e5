"""The complete scripts in the pages on frameworks run as they stand, and a second time go on from memory."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import SUPPORT

from mlflash.run.processes import mpiexec

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"


@dataclasses.dataclass(frozen=True)
class Page:
    """How a page's script is started, and what is said then."""

    restored: str  # by the framework, or mlflash, of a start from memory
    begins: str = "begins after step {}"  # by each rank, of the step it begins after,
    ahead: int = 0  # plus this
    steps: tuple[int, int] = (20, 25)  # after which the two runs end; the first one's last is in memory
    before: tuple[str, ...] = ()  # what stands in for a GPU: started with the script as its argument
    arguments: str = ""  # before the last step

    def start(self, script: Path, last: int, memory: Path) -> str:
        """Run it on two ranks, to a step."""
        arguments = [*self.before, str(script), *self.arguments.split(), str(last)]
        program = [sys.executable, "-W", "ignore", *arguments]
        environment = {"MLFLASH_MEMORY": str(memory), "RANKS_PER_NODE": "1", "TMPDIR": str(memory)}
        line, env = mpiexec(2, [sys.executable, str(SUPPORT / "on_node.py"), *program], environment)
        result = subprocess.run(
            line, env=env, cwd=script.parent, timeout=100, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout + result.stderr

    def beginnings(self, printed: str, step: int) -> int:
        """How many ranks said that they begin after a step.

        A line's end may come late: a progress bar that refreshes in a thread can flush between it and its text.
        """
        return len(re.findall(self.begins.format(step + self.ahead) + r"(?!\d)", printed))


PAGES = {
    "lightning": Page("from the checkpoint at mlflash:20"),
    "transformers": Page("restored step 20 from memory"),
    "deepspeed": Page("step 20 of mlflash"),
    "torchtitan": Page(
        "restored step 4 from memory", "Training starts at step {}", 1, (4, 5), (str(HERE / "titan_on_cpu.py"),),
        "--module train --config small --parallelism.spmd_backend partial_dtensor --checkpoint.memory_interval 4 "
        "--training.steps",
    ),
    "nemo": Page("run42/mlflash/step-00000020", before=(str(HERE.parent / "support" / "nemo_on_cpu.py"),)),
}  # fmt: skip


@pytest.mark.parametrize("page", PAGES)
def test_a_script_goes_on_from_memory_when_it_is_started_again(page: str, shm: Path, tmp_path: Path) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", (DOCS / f"{page}.md").read_text(), re.M | re.S)
    script = tmp_path / "train.py"
    script.write_text(block)
    first, second = PAGES[page].steps
    assert PAGES[page].beginnings(PAGES[page].start(script, first, shm), 0) == 2
    again = PAGES[page].start(script, second, shm)
    assert PAGES[page].beginnings(again, first) == 2 and PAGES[page].restored in again, again
