"""`mlflash run --keep-alive` of `kept_trainer.py` on nodes, and what the same training does that nothing happens to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.jobs import NETMODS
from cluster.nodes import HEAD, Nodes
from cluster.slurm.daemons import Slurm
from run_results import Launched, Results
from waiting import until

MLFLASH = str(Path(sys.executable).with_name("mlflash"))
TRAINER = Path(__file__).with_name("kept_trainer.py")
LOST_S, BUSY_S = 2, 15  # after which a silent host is lost; where none is to be lost, however busy this machine is
_SCRIPT = """#!/bin/sh
"$MLFLASH" run -N "$RANKS" --ranks-per-node 1 --keep-alive --lost-after "$LOST_S" --job kept $MORE \\
  --journal "$OUT/run.jsonl" -- "$PYTHON" "$TRAINER" "$OUT" "$LAST" "$TRAINING"
echo $? > "$OUT/code.part" && mv "$OUT/code.part" "$OUT/code"
exit "$(cat "$OUT/code")"
"""
_ENV = {"FI_PROVIDER": "tcp", "MPIR_CVAR_CH4_NETMOD": "ofi", "OMP_NUM_THREADS": "1"}


class Kept(Results):
    """What a training writes that has one rank on each node."""

    nodes: Nodes
    ranks: int

    def steps(self, rank: int) -> list[list[str]]:
        """What a rank has noted of each step: when, which, by which process, its number of entries, on which host."""
        path = self.out / f"steps-{rank}"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def last_step(self, rank: int) -> list[str]:
        with (self.out / f"steps-{rank}").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 200))
            return file.read().decode().splitlines()[-1].split()

    def wait_for(self, step: int) -> None:
        until(lambda: all(any(int(line[1]) >= step for line in self.steps(rank)) for rank in range(self.ranks)),
              lambda: f"step {step}:\n{self.log()}")  # fmt: skip

    def wait_for_spare(self, host: str) -> None:
        """Wait until a process on a host can take a rank."""
        until(lambda: [*self.out.glob(f"waits-{host}-*")], lambda: f"a spare on {host}:\n{self.log()}")

    def host_of(self, rank: int) -> str:
        return self.last_step(rank)[4]

    def process_of(self, rank: int) -> int | None:
        """The process that did it, by the numbers of this machine; None: it has ended."""
        inside = self.last_step(rank)[2]
        running = self.nodes.running(self.host_of(rank), str(TRAINER))
        return next((pid for pid in running if number_inside(pid) == inside), None)

    def stop(self) -> int:
        """Let it end after a step that it has not come to yet. Return this step."""
        last = max(int(self.last_step(rank)[1]) for rank in range(2)) + 50
        (self.out / "stop.part").write_text(str(last))
        (self.out / "stop.part").rename(self.out / "stop")
        return last

    def go_on(self, step: int | None = None) -> None:
        """Let it go on where it holds: at ``hold_at``, or at a step of ``holds``."""
        (self.out / ("go on" if step is None else f"go on {step}")).touch()


class KeptRun(Launched, Kept):
    """A run that was started on the head, by a remote shell; nodes beyond the ranks wait. Close it.

    Args:
        hosts: nodes; None: all.
        more: more options of `mlflash run`.
    """

    def __init__(self, nodes: Nodes, ranks: int, last: int, hosts: int | None = None, more: Sequence[str] = (),
                 **training: Any):  # fmt: skip
        self.nodes, self.ranks, out = nodes, ranks, nodes.path / "out"
        training = {"settings": {"job": "kept"}, **training}
        told = ["--keep-alive", "-N", ranks, "--hosts", ",".join(nodes.names[:hosts]), "--rsh", nodes.shell, "--job",
                "kept", "--lost-after", LOST_S, "--journal", out / "run.jsonl", *more]  # fmt: skip
        words = [MLFLASH, "run", *told, "--", sys.executable, TRAINER, out, last, json.dumps(training)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")} | _ENV
        environment["PYTHONPATH"] = str(TRAINER.parent)
        Launched.__init__(self, out, nodes.command(HEAD, [*map(str, words)]), environment)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None


class KeptJob(Kept):
    """A job of Slurm, whose nodes are one more than the ranks."""

    def __init__(self, slurm: Slurm, ranks: int, last: int, lost_s: float = LOST_S, more: Sequence[str] = (),
                 **training: Any):  # fmt: skip
        super().__init__(slurm.path / "out")
        self.nodes, self.ranks = slurm.nodes, ranks
        paths = os.pathsep.join(filter(None, (str(TRAINER.parent), os.environ.get("PYTHONPATH"))))
        env = {**NETMODS["ofi"], "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable,
               "MLFLASH": MLFLASH, "TRAINER": str(TRAINER), "OUT": str(self.out), "LAST": str(last),
               "RANKS": str(ranks), "LOST_S": str(lost_s), "MORE": " ".join(more),
               "TRAINING": json.dumps({"settings": {"job": "kept"}, **training})}  # fmt: skip
        self.slurm = slurm
        self.job = slurm.sbatch(_SCRIPT, f"--nodes={ranks + 1}", "--exclusive", "--no-kill", env=env)

    @property
    def has_ended(self) -> bool:
        return (self.out / "code").exists()

    def log(self) -> str:
        return f"{self.job.output()}\n{self.slurm.logs()}"

    def wait(self, timeout: float = 90) -> int:
        until(lambda: self.has_ended, lambda: f"its end:\n{self.log()}", timeout)
        return int((self.out / "code").read_text())

    def close(self) -> None:
        self.job.cancel()


def uninterrupted(out: Path, *parts: tuple[int, int], **training: Any) -> list[str]:
    """Digests of the final state of ranks that nothing happens to; on this host, without redundancy.

    Args:
        parts: each a number of ranks, and the step until which so many train.
    """
    options = json.dumps({"settings": {"job": "alone", "redundancy": "none"}, **training})
    environment = {**os.environ, **_ENV, "PYTHONPATH": str(TRAINER.parent), "MLFLASH_MEMORY": str(out)}
    for ranks, last in parts:
        told = ["-N", 1, "--ranks-per-node", ranks, "--launcher", "ssh", "--job", "alone", "--keep-memory", "--journal",
                out / "run.jsonl"]  # fmt: skip
        words = [MLFLASH, "run", *told, "--", sys.executable, TRAINER, out, last, options]
        subprocess.run([*map(str, words)], env=environment, check=True, timeout=90 + last / 10)
    return [end["digest"] for end in Results(out).ends()[: parts[-1][0]]]


def number_inside(pid: int) -> str:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split()[-1] for line in lines if line.startswith("NSpid:")), "")
