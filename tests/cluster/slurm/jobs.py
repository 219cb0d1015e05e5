"""Jobs of the Slurm of `daemons.py`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.jobs import NETMODS
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from cluster.slurm.daemons import Slurm

ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")

MPI_ENVIRONMENT = NETMODS["ucx"]
MLFLASH = Path(sys.executable).with_name("mlflash")


def written(slurm: Slurm, template: str, more: str, *options: object) -> str:
    """The batch script that `mlflash template` writes on the login node.

    ``more`` are options for `mlflash run` that hold instead of the script's, as the tests have less patience.
    """
    folder = slurm.path / f"written{len([*slurm.path.glob('written*')])}"
    slurm.run(str(MLFLASH), "template", template, "--output", str(folder), "--time", "10", *map(str, options))
    text = (folder / f"{template}.sbatch").read_text()
    assert text.count('"${options[@]}"') == 1
    return text.replace('"${options[@]}"', f'"${{options[@]}}" --look-every 3 {more}')


class Job:
    def __init__(self, slurm: Slurm, id: str):
        self.id = id
        self._slurm = slurm

    def details(self) -> dict[str, str]:
        """What ``scontrol show job`` says of it: JobState, NodeList, Restarts, ExitCode, ..."""
        shown = self._slurm.run("scontrol", "--oneliner", "show", "job", self.id).stdout
        return dict(re.findall(r"(\S+?)=(\S*)", shown))

    def state(self) -> str:
        return self.details()["JobState"]

    def hosts(self) -> list[str]:
        names = self.details()["NodeList"]
        return [] if names in ("", "(null)") else self._slurm.run("scontrol", "show", "hostnames", names).stdout.split()

    def output(self) -> str:
        path = Path(self.details()["StdOut"])
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, wanted: str, timeout: float = PATIENCE_S) -> None:
        """Wait for a state."""

        def reached() -> bool:
            state = self.state()
            assert state == wanted or state not in ENDED, self._shown(f"ended as {state}, not {wanted}")
            return state == wanted

        self._slurm.wait(lambda: self._shown(wanted), reached, timeout)

    def signal(self, name: str, *options: str) -> None:
        """Send it a signal: to its steps; with ``--batch`` to the shell of its script, with ``--full`` to both."""
        self._slurm.run("scancel", f"--signal={name}", *options, self.id)

    def cancel(self) -> None:
        """Cancel it, and wait until it has ended."""
        self._slurm.run("scancel", self.id)
        self._slurm.wait(lambda: self._shown("its end"), lambda: self.state() in ENDED, PATIENCE_S)

    def _shown(self, what: str) -> str:
        details = " ".join(f"{key}={value}" for key, value in self.details().items())
        return f"job {self.id}: {what}\n{details}\n--- what it printed\n{self.output()[-5000:]}"
