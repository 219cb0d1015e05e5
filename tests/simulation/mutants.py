"""Mistakes in the protocol, each of which the simulator must find: `python tests/simulation/mutants.py [NAME ...]`.

A mutant replaces a few lines in a copy of mlflash, in a process that runs seeds until one fails. How many seeds that
takes is what the simulator is worth. If a line was moved or rewritten, its mutant fails loudly: choose other lines.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

if __name__ == "__main__" and os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets must be the same each time
    os.environ.update(PYTHONHASHSEED="0", OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

SEEDS = 300


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A mistake.

    Attributes:
        name: of the mutant.
        wrong: what is wrong.
        file: of the package.
        old: lines of it, which occur once there.
        new: what they become.
        fixed: fields of the setting that are given.
    """

    name: str
    wrong: str
    file: str
    old: str
    new: str
    fixed: dict[str, object] = dataclasses.field(default_factory=dict)


MUTANTS = [
    # Commit
    Mutant(
        "freed-before-agreed", "older slots are free as soon as a save is announced", "commit/commit.py",
        '    reach("protect.announced")\n',
        '    reach("protect.announced")\n    state.pool.hold_only([])\n    state.tell_trainer()\n',
    ),
    Mutant(
        "commit-before-copies", "the commit is written before the copies are made", "commit/commit.py",
        "    all_arrived = state.protection.protect(",
        "    _record(save, state, [save.slot])\n    all_arrived = state.protection.protect(",
    ),
    Mutant(
        "told-before-agreed", "the snapshot says committed when this rank is done", "commit/commit.py",
        '    reach("protect.sealed")\n',
        '    reach("protect.sealed")\n    save.trainer.ended(request.problem, False)\n',
    ),
    Mutant(
        "failure-counts-as-commit", "after a save that failed on all ranks, its slots are held and older ones freed",
        "commit/commit.py",
        "    committed = error is None and not save.skipped\n",
        "    committed = not save.skipped\n", {"special": frozenset({"grow"}), "no_space": 0.3},
    ),
    Mutant(
        "failure-not-told", "a save that failed looks committed to the trainer", "commit/commit.py",
        'were busy") if save.skipped else error\n',
        'were busy") if save.skipped else None\n',
    ),
    Mutant(
        "skip-not-agreed", "a rank skips a save that others do not skip", "commit/commit.py",
        "    save.skipped = agreed.skips\n",
        "    save.skipped = save.request.skip\n",
    ),
    Mutant(
        "room-not-agreed", "only ranks with too small slots make room", "commit/commit.py",
        "    if agreed.grows and not agreed.skips:\n",
        "    if grow and not agreed.skips:\n",
    ),
    Mutant(
        "generation-reused", "a run numbers its attempts from 1 again", "commit/start.py",
        "    state.generation, state.floor, state.left.unusable = earlier.newest, ",
        "    state.generation, state.floor, state.left.unusable = 0, ",
    ),
    # Slots
    Mutant(
        "holds-the-old", "after a commit, the older attempt is held and the new one freed", "memory/slot_pool.py",
        "(slot.header is None or slot.header.attempt not in held):\n",
        "(slot.header is None or slot.header.attempt in held):\n",
    ),
    Mutant(
        "held-given-away", "the trainer gets slots that hold what must be kept", "memory/slot_pool.py",
        "oldest_free(slots) or leave_behind(",
        "next((one for one in slots if not one.lease), None) or leave_behind(",
    ),
    # Transfer
    Mutant(
        "window-of-the-other-slot", "a Put goes to the other slot of the pair", "protect/protection.py",
        "        return self._windows[index][nth], ",
        "        return self._windows[1 - index][nth], ",
    ),
    Mutant(
        "window-of-the-first-owner", "a Put goes to the inbox of another rank", "protect/protection.py",
        "        nth = self._owners_of[partner].index(self._world.rank)\n", "        nth = 0\n",
    ),
    Mutant(
        "late-is-damaged", "a Put that is not visible yet counts as damaged", "protect/transfer.py",
        "ARRIVAL_S = 30.0", "ARRIVAL_S = 0.0",
    ),
    Mutant(
        "windows-left-open", "windows expose files that slots no longer have", "commit/courier_state.py",
        "        self.protection.close_windows()\n        try:", "        try:",
    ),
    # Parity
    Mutant(
        "short-block-unpadded", "what follows a short block is not zeros", "protect/parity.py",
        "            self._lanes[lane][nbytes:] = 0\n", "",
    ),
    Mutant(
        "lane-reused-early", "a buffer is used again while its block is still sent", "protect/parity.py",
        "        for nth, unit, coded in zip(",
        "        self._free, lanes = self._free + lanes, []\n        for nth, unit, coded in zip(",
    ),
    Mutant(
        "parity-block-shared", "all parity blocks of a row have one place", "memory/parity_layout.py",
        "True, row * self.losses + nth))", "True, row * self.losses))",
    ),
    Mutant(
        "heads-not-in-table", "the table of a parity file does not have its heads", "protect/parity.py",
        "        table[:first] = target.check_blocks(extents, 0, first)\n", "",
    ),
    Mutant(
        "one-loss-too-many", "as many losses as the scheme covers are refused", "memory/parity_layout.py",
        "            if len(missing) > self.losses:\n", "            if len(missing) >= self.losses:\n",
    ),
    # Restore
    Mutant(
        "inventory-of-this-node", "a rank chooses by the files of its own node", "commit/earlier_runs.py",
        "for packed in world.gather_nodes(own)])\n",
        "for packed in [inventory.encode(inventory.scan(memory, world.node_index))]])\n",
    ),
    Mutant(
        "slot-missing", "an attempt is chosen that has no slot for some rank", "commit/earlier_runs.py",
        "    if missing - rebuilt.keys() or not", "    if not slots or not",
    ),
    Mutant(
        "unverified", "slots are not verified before they are loaded", "restore/fetch.py",
        "choice.group_of(rank) is not None) if checked else []\n", "True) if False else []\n",
    ),
    Mutant(
        "damage-ignored", "bad blocks that parity could repair are loaded", "restore/fetch.py",
        "    if not bad and (damaged or choice.rebuilt):\n", "    if not bad and choice.rebuilt:\n",
    ),
    Mutant(
        "damage-not-told", "only the rank that finds a damaged slot passes it over", "restore/fetch.py",
        "    reports = [pair for pairs in world.gather(damage) for pair in pairs]\n    bad = {",
        "    reports = damage\n    bad = {",
    ),
    Mutant(
        "lost-is-never-was", "a committed step that cannot be restored counts as nothing", "restore/choose.py",
        "        if reasons or listing.problem:\n", "        if listing.problem:\n",
    ),
    # Reprotect
    Mutant(
        "reprotect-makes-nothing", "missing copies and parity are not made again", "restore/repair.py",
        "        protect_missing(context, home, lacking)\n        reach(", "        reach(",
    ),
    Mutant(
        "reprotect-not-agreed", "only ranks whose copies are missing reprotect", "restore/repair.py",
        "    some_lack = world.any_of(lacking)\n", "    some_lack = lacking\n",
    ),
    Mutant(
        "copies-not-verified", "a damaged copy counts as whole", "protect/protection.py",
        "any_intact(_copies_of(pool, owner, attempt), Slot.verify, what, forget)",
        "bool(_copies_of(pool, owner, attempt))", {"flips": True, "scheme": "copy", "launches": 4},
    ),
    # Special
    Mutant(
        "step-before-copy", "an optimizer steps before its tensors are copied", "save/deferred_copies.py",
        "        self.help()\n        self._await_pieces()\n        for transfer in self._transfers:\n"
        "            transfer.hold_back()\n",
        "", {"special": frozenset({"lazy"})},
    ),
    Mutant(
        "suspicion-not-agreed", "only the rank that finds suspect values knows of them", "commit/commit.py",
        "    save.is_suspect = not not_suspect\n", "    save.is_suspect = bool(findings)\n",
    ),
    Mutant(
        "repair-not-agreed", "only the rank that has damage repairs first", "commit/commit.py",
        "    if agreed.damaged and not save.is_restored:\n", "    if state.damaged and not save.is_restored:\n",
    ),
    Mutant(
        "damage-for-ever", "damage that was repaired is reported again", "restore/repair.py",
        "    context.damaged = False\n    start, world", "    start, world",
    ),
    Mutant(
        "share-unverified", "shares are not verified before they are loaded", "restore/fetch.py",
        "if checked:\n                        slot.verify(", "if not checked:\n                        slot.verify(",
        {"flips": True, "special": frozenset({"common"})},
    ),
    Mutant(
        "shares-not-fetched", "shares are not fetched from other nodes", "restore/fetch.py",
        "    pending = [] if bad else [e for e in errands if e.comes]\n", "    pending: list[_Errand] = []\n",
    ),
    Mutant(
        "drain-error-not-agreed", "a rank that cannot write its file gives the drain up alone",
        "drain/drain_runs.py",
        "        yield from collectives.raise_together(error)\n        reach(",
        "        if error is not None:\n            raise error\n        reach(",
    ),
    Mutant(
        "drain-told-early", "a drain counts as ended before its checkpoint is there", "drain/drain_runs.py",
        "        def moves() -> Operation:\n", "        def moves() -> Operation:\n            current.end(None)\n",
    ),
    Mutant(
        "all-complete-at-restart", "saves that a courier had when it died count as committed", "channel/client.py",
        "job.answers.request.step == step\n            if is_there and generation > self._generation:\n",
        "True\n            if is_there:\n",
    ),
    Mutant(
        "saves-not-sent-again", "saves that the last courier had are not sent to the next one", "channel/client.py",
        "job.is_sent = False\n            self._connection.send_first(job)\n", "job.is_sent = False\n",
    ),
    # Waits
    Mutant(
        "error-not-told", "an error of one rank is raised there only", "mpi/world.py",
        "        self.raise_together(error)\n        return results[0]\n",
        "        if error is not None:\n            raise error\n        return results[0]\n",
    ),
]  # fmt: skip


# Running them


@dataclasses.dataclass
class Finding:
    """The first of some seeds that finds a mutant, and what it says; None: none does."""

    seed: int | None
    said: str
    cpu_s: float


def find(mutant: Mutant, seeds: Iterable[int], fixed: Mapping[str, object]) -> Finding:
    """Run seeds with a mutant until one fails.

    The caller has not imported mlflash: it is imported in a child, which runs the seeds.
    """
    assert "mlflash" not in sys.modules
    (package,) = map(Path, importlib.util.find_spec("mlflash").submodule_search_locations)  # type: ignore[union-attr,arg-type]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "mlflash"
        shutil.copytree(package, copy, ignore=shutil.ignore_patterns("adapters", "slurm"))  # which nothing here imports
        path = copy / mutant.file
        text = path.read_text()
        assert text.count(mutant.old) == 1, f"{mutant.name}: its lines occur {text.count(mutant.old)} times"
        path.write_text(text.replace(mutant.old, mutant.new))
        with ProcessPoolExecutor(1, get_context("fork")) as child:
            return child.submit(_search, folder, seeds, {**fixed, **mutant.fixed}).result()


def _search(folder: str, seeds: Iterable[int], fixed: Mapping[str, object]) -> Finding:
    sys.path.insert(0, folder)
    import machine

    machine.install()
    import runner

    assert str(sys.modules["mlflash"].__file__).startswith(folder)
    cpu_s, seeds = 0.0, list(seeds)
    for seed, result in zip(seeds, runner.run_all(runner.seeds(seeds, fixed)), strict=False):
        cpu_s += result.get("cpu_s", 0.0)
        if result["problems"]:
            return Finding(seed, result["problems"][0][-2000:], cpu_s)
    return Finding(None, "", cpu_s)


def _one_line(text: str) -> str:
    """What says most: one line, or the first and the last one of a traceback."""
    lines = [line for line in text.splitlines() if line.strip()]
    return "".join(lines) if len(lines) < 2 else f"{lines[0]} ... {lines[-1]}"


def main() -> int:
    """Print which seed finds each mutant; 1 if some mutant is not found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="so many at the most")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of faults.Setting")
    args = parser.parse_args()
    import torch.distributed.checkpoint  # once, and not again for each mutant
    from faults import parse

    torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()

    unknown = set(args.names) - {mutant.name for mutant in MUTANTS}
    assert not unknown, f"there are no mutants {unknown}"
    findings = []
    for mutant in MUTANTS:
        if not args.names or mutant.name in args.names:
            findings.append(finding := find(mutant, range(args.seeds), parse(args.set)))
            seed = "none" if finding.seed is None else finding.seed
            print(f"{mutant.name:28} {seed:>4} {finding.cpu_s:6.1f} s  {_one_line(finding.said)[:120]}", flush=True)
    firsts = sorted(finding.seed for finding in findings if finding.seed is not None)
    print(f"{len(firsts)} of {len(findings)} found; median seed {firsts[len(firsts) // 2] if firsts else '-'}, "
          f"{sum(finding.cpu_s for finding in findings):.0f} s of CPU")  # fmt: skip
    return int(len(firsts) < len(findings))


if __name__ == "__main__":
    sys.exit(main())
