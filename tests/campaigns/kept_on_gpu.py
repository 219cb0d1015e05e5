"""Kill ranks of a training on a GPU, one after the other, and see that the others go on with the same bits.

    PYTHONPATH=tests/support \\
        python tests/campaigns/kept_on_gpu.py [--on cpu] [--kinds ddp fsdp] [--ranks 3] [--out FOLDER]

All ranks and a process that waits share one GPU, by NCCL: each says that it is on a machine of its own, as NCCL wants
no two of one machine on the same GPU. For each kind of model one rank is killed at each place of a step; survivors
abort NCCL's communicators and stay, and the end has the bits of a training that nothing happens to. Needs no root, and
no more than mlflash and PyTorch; it is no part of CI, which has no GPU. --on cpu shows whether the script itself works.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from run_results import Results
from waiting import until

ROOT = Path(__file__).parents[2]
TRAINER = ROOT / "tests" / "support" / "kept_trainer.py"
PLACES = ("forward", "backward", "optimizer", "save", "fetch")
EVERY = 10  # steps from one kill to the next
LAST, DEADLINE_S = EVERY * (len(PLACES) + 1), 60.0


class Training(Results):
    """`mlflash run` on this host. Close it.

    Args:
        out: its folder, which is made.
        ranks: how many train.
        last: the last step.
        is_kept: whether ranks that are lost are replaced, by one process that waits.
        training: see `kept_trainer`.
    """

    def __init__(self, out: Path, ranks: int, last: int, is_kept: bool, **training: Any):
        super().__init__(out)
        self.ranks = ranks
        memory = Path(tempfile.mkdtemp(prefix="kept-on-gpu-", dir="/dev/shm"))
        told = ["--keep-alive", "--spares", 1] if is_kept else ["--launcher", "ssh"]
        words = [sys.executable, "-m", "mlflash", "run", "-N", 1, "--ranks-per-node", ranks, "--job", out.name,
                 "--journal", out / "run.jsonl", *told, "--", sys.executable, TRAINER, out, last,
                 json.dumps({"settings": {"job": out.name, "redundancy": "none"}, **training})]  # fmt: skip
        paths = os.pathsep.join(filter(None, (str(ROOT), str(TRAINER.parent), os.environ.get("PYTHONPATH"))))
        env = {**os.environ, "PYTHONPATH": paths, "MLFLASH_MEMORY": str(memory), "OMP_NUM_THREADS": "1",
               "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # fmt: skip
        self._memory, self._log = memory, (out / "log").open("w")
        self._process = subprocess.Popen([*map(str, words)], stdout=self._log, stderr=self._log, env=env)

    def log(self) -> str:
        return (self.out / "log").read_text()[-6_000:]

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(30)
        self._log.close()
        shutil.rmtree(self._memory, ignore_errors=True)

    def wait(self) -> int:
        return self._process.wait(DEADLINE_S)

    def last_steps(self) -> list[list[str]]:
        """What each rank has noted last: when, step, process, entries, host."""
        paths = [self.out / f"steps-{rank}" for rank in range(self.ranks)]
        texts = [path.read_text() if path.exists() else "" for path in paths]
        return [text[: text.rfind("\n")].rpartition("\n")[2].split() for text in texts]

    def reach(self, step: int) -> None:
        until(lambda: all(line and int(line[1]) >= step for line in self.last_steps()), self.log, DEADLINE_S)

    def a_spare_waits(self) -> None:
        def waits() -> bool:
            self._check_that_it_runs()
            ranks = {line[2] for line in self.last_steps()}
            waiting = {path.name.rpartition("-")[2] for path in self.out.glob("waits-*")} - ranks
            return any(Path(f"/proc/{pid}").exists() for pid in waiting)

        until(waits, self.log, DEADLINE_S)

    def lose(self, rank: int, step: int, place: str) -> dict[str, Any]:
        """Let the training go on to where a rank is killed; how long it took until all had done another step."""
        before = self.last_steps()
        (self.out / f"go on {step - 1}").touch()
        died = self.out / f"died-{rank}-{step}-{place}"

        def again() -> bool:
            self._check_that_it_runs()
            now = self.last_steps()
            return died.exists() and all(
                int(line[1]) >= step and line != old for line, old in zip(now, before, strict=True)
            )

        until(again, self.log, DEADLINE_S)
        after, event = self.last_steps(), self.events("recovered")[-1]
        assert all(after[one][2] == before[one][2] for one in range(self.ranks) if one != rank), "other processes"
        seconds = max(float(line[0]) for line in after) - float(died.read_text())
        return {"place": place, "rank": rank, "seconds": round(seconds, 3), **event["times"]}

    def _check_that_it_runs(self) -> None:
        code = self._process.poll()
        assert code is None, f"it has ended with {code}:\n{self.log()}"


def recoveries(folder: Path, kind: str, device: str, ranks: int) -> list[dict[str, Any]]:
    """Kill one rank at each place, and compare the end with that of an uninterrupted run."""
    plan = [((number + 1) % ranks, (number + 1) * EVERY, place) for number, place in enumerate(PLACES)]
    kept = Training(folder / f"{kind}-kept", ranks, LAST, True, kind=kind, device=device, die=plan, attacked=True,
                    holds=[step - 1 for _, step, _ in plan])  # fmt: skip
    found = []
    try:
        for rank, step, place in plan:
            kept.reach(step - 2)
            kept.a_spare_waits()
            found.append(kept.lose(rank, step, place))
            print(f"  {kind}: {json.dumps(found[-1])}", flush=True)
        assert kept.wait() == 0, kept.log()
        assert len(kept.events("start")) == 1, f"all were started again:\n{kept.log()}"
    finally:
        kept.close()
    alone = Training(folder / f"{kind}-alone", ranks, LAST, False, kind=kind, device=device)
    try:
        assert alone.wait() == 0, alone.log()
    finally:
        alone.close()
    bits = [[end["digest"] for end in one.ends()] for one in (kept, alone)]
    assert bits[0] == bits[1], f"{kind}: other bits: {bits}"
    assert len(bits[0]) == ranks
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--kinds", nargs="+", default=["ddp", "fsdp"])
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a folder for logs, which is kept")
    args = parser.parse_args()
    if args.on == "cuda" and not torch.cuda.is_available():
        print("needs CUDA, and torch sees none here: nothing was tried")
        return 0
    folder = args.out or Path(tempfile.mkdtemp(prefix="kept-on-gpu-"))
    folder.mkdir(parents=True, exist_ok=True)
    for kind in args.kinds:
        seconds = [one["seconds"] for one in recoveries(folder, kind, args.on, args.ranks)]
        print(f"{kind} on {args.on}: {len(seconds)} of {len(PLACES)} kills survived, the same bits; from SIGKILL to "
              f"the next step of all: median {statistics.median(seconds):.2f}, worst {max(seconds):.2f} s")  # fmt: skip
    if args.out is None:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
