"""Kill ranks of a training on a GPU, one after the other, and see that the others go on with the same bits.

    PYTHONPATH=tests/support python tests/campaigns/kept_on_gpu.py [--on cpu] [--kinds ddp fsdp] --out FOLDER

All ranks and a process that waits share one GPU, by NCCL: each says that it is on a machine of its own, as NCCL wants
no two of one machine on the same GPU. For each kind of model one rank is killed at each place of a step; survivors
abort NCCL's communicators and stay, and the end has the bits of a training that nothing happens to. Needs no root, and
no more than mlflash and PyTorch; it is no part of CI, which has no GPU. --on cpu shows whether the script itself works.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from run_results import Launched
from waiting import until

ROOT = Path(__file__).parents[2]
TRAINER = ROOT / "tests" / "support" / "kept_trainer.py"
RANKS = 3
PLACES = ("forward", "backward", "optimizer", "save", "fetch")
EVERY = 10  # steps from one kill to the next
LAST, DEADLINE_S = EVERY * (len(PLACES) + 1), 60.0


class Training(Launched):
    """`mlflash run` on this host, whose ranks are replaced by one process that waits, if it is kept. Close it.

    See `kept_trainer` for the options.
    """

    def __init__(self, folder: Path, memory: str, is_kept: bool, **options: Any):
        kept = ["--keep-alive", "--spares", 1] if is_kept else ["--launcher", "ssh"]
        spec = {"settings": {"job": folder.name, "redundancy": "none"}, **options}
        words = [sys.executable, "-m", "mlflash", "run", "-N", 1, "--ranks-per-node", RANKS, "--job", folder.name,
                 "--journal", folder / "run.jsonl", *kept, "--", sys.executable, TRAINER, folder, LAST,
                 json.dumps(spec)]  # fmt: skip
        paths = os.pathsep.join(filter(None, (str(ROOT), str(TRAINER.parent), os.environ.get("PYTHONPATH"))))
        env = {**os.environ, "PYTHONPATH": paths, "MLFLASH_MEMORY": memory, "OMP_NUM_THREADS": "1",
               "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # fmt: skip
        super().__init__(folder, [*map(str, words)], env)

    def digests(self) -> list[str]:
        """Wait for its end; gives the digest of each rank."""
        assert self.wait(DEADLINE_S) == 0, self.log()
        return [end["digest"] for end in self.ends()]

    def last_steps(self) -> list[list[str]]:
        """What each rank has noted last: when, step, process, entries, host."""
        paths = [self.out / f"steps-{rank}" for rank in range(RANKS)]
        texts = [path.read_text() if path.exists() else "" for path in paths]
        return [text[: text.rfind("\n")].rpartition("\n")[2].split() for text in texts]

    def is_ready(self, step: int) -> bool:
        """Whether all ranks have done a step, and a process waits."""
        steps = self.last_steps()
        waiting = {path.name.rpartition("-")[2] for path in self.out.glob("waits-*")}
        waiting -= {line[2] for line in steps if line}
        has_spare = any(Path(f"/proc/{pid}").exists() for pid in waiting)
        return has_spare and all(line and int(line[1]) >= step for line in steps)

    def until(self, condition: Any) -> None:
        until(lambda: self._process.poll() is not None or condition(), self.log, DEADLINE_S)
        assert self._process.poll() is None, f"it has ended:\n{self.log()}"

    def lose(self, rank: int, step: int, place: str) -> dict[str, Any]:
        """Let the training go on to where a rank is killed; how long it took until all had done another step."""
        before, died = self.last_steps(), self.out / f"died-{rank}-{step}-{place}"
        (self.out / f"go on {step - 1}").touch()
        self.until(lambda: died.exists() and all(
            int(line[1]) >= step and line != old for line, old in zip(self.last_steps(), before, strict=True)
        ))  # fmt: skip
        after, event = self.last_steps(), self.events("recovered")[-1]
        assert all(after[other][2] == before[other][2] for other in range(RANKS) if other != rank), "other processes"
        seconds = max(float(line[0]) for line in after) - float(died.read_text())
        return {"place": place, "rank": rank, "seconds": round(seconds, 3), **event["times"]}


def recoveries(folder: Path, kind: str, device: str) -> list[dict[str, Any]]:
    """Kill one rank at each place, and compare the end with that of an uninterrupted run."""
    plan = [((number + 1) % RANKS, (number + 1) * EVERY, place) for number, place in enumerate(PLACES)]
    options, losses = {"kind": kind, "device": device}, []
    holds = {"die": plan, "attacked": True, "holds": [step - 1 for _, step, _ in plan]}
    with tempfile.TemporaryDirectory(prefix="kept-on-gpu-", dir="/dev/shm") as memory:
        with contextlib.closing(Training(folder / f"{kind}-kept", memory, True, **options, **holds)) as kept:
            for rank, step, place in plan:
                kept.until(lambda step=step: kept.is_ready(step - 2))
                losses.append(kept.lose(rank, step, place))
                print(f"  {kind}: {json.dumps(losses[-1])}", flush=True)
            digests = kept.digests()
            assert len(kept.events("start")) == 1, f"all were started again:\n{kept.log()}"
        with contextlib.closing(Training(folder / f"{kind}-alone", memory, False, **options)) as alone:
            assert digests == alone.digests() and len(digests) == RANKS, f"{kind}: other bits"
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--kinds", nargs="+", default=["ddp", "fsdp"])
    parser.add_argument("--out", type=Path, required=True, help="a folder for logs")
    args = parser.parse_args()
    if args.on == "cuda" and not torch.cuda.is_available():
        print("needs CUDA, and torch sees none here: nothing was tried")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    for kind in args.kinds:
        seconds = [recovery["seconds"] for recovery in recoveries(args.out, kind, args.on)]
        print(f"{kind} on {args.on}: {len(seconds)} of {len(PLACES)} kills survived, the same bits; from SIGKILL to "
              f"the next step of all: median {statistics.median(seconds):.2f}, worst {max(seconds):.2f} s")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
