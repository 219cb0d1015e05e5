"""Mistakes in the protocol, each of which the simulator must find: `python tests/simulation/mutants.py [NAME ...]`.

A mutant replaces a few lines in a copy of mlflash, in a process that runs seeds until one fails. How many seeds that
takes is what the simulator is worth. If a line was moved or rewritten, its mutant fails loudly: choose other lines.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__" and os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets must be the same each time
    os.environ.update(PYTHONHASHSEED="0", OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

SEEDS = 300
_MOST_S = 600.0  # of one seed, in real time


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
        seed: one that finds it; the gate runs some of these.
    """

    name: str
    wrong: str
    file: str
    old: str
    new: str
    fixed: dict[str, object] = dataclasses.field(default_factory=dict)
    seed: int | None = None


MUTANTS = [
    # Commit
    Mutant(
        "freed-before-agreed", "older slots are free as soon as a save is announced", "saving/commit.py",
        '    reach("protect.announced")\n',
        '    reach("protect.announced")\n    context.pool.hold_only([])\n    context.tell_trainer()\n',
    ),
    Mutant(
        "receipt-before-copies", "the receipt is written before the copies are made", "saving/commit.py",
        "    context.pace.begin()\n",
        "    _record(save, context, [save.slot])\n    context.pace.begin()\n",
    ),
    Mutant(
        "told-before-agreed", "the snapshot says committed when this rank is done", "saving/commit.py",
        '    reach("protect.sealed")\n',
        '    reach("protect.sealed")\n    save.trainer.ended(save.problem, False)\n',
    ),
    Mutant(
        "failure-counts-as-commit", "after a save that failed on all ranks, its slots are held and older ones freed",
        "saving/commit.py",
        "    committed = error is None and not save.skipped\n",
        "    committed = not save.skipped\n",
    ),
    Mutant(
        "failure-not-told", "a save that failed looks committed to the trainer", "saving/commit.py",
        'were busy") if save.skipped else error\n',
        'were busy") if save.skipped else None\n',
    ),
    Mutant(
        "skip-not-agreed", "a rank skips a save that others do not skip", "saving/commit.py",
        "    save.skipped = not no_skip\n",
        "    save.skipped = save.request.skip\n",
    ),
    Mutant(
        "room-not-agreed", "only ranks with too small slots make room", "saving/commit.py",
        "    if not can_wait and no_skip:\n",
        "    if grow and no_skip:\n",
    ),
    Mutant(
        "generation-reused", "a run numbers its attempts from 1 again", "startup/start.py",
        "    context.generation, context.floor, context.unusable = left.newest, ",
        "    context.generation, context.floor, context.unusable = 0, ",
    ),
    # Slots
    Mutant(
        "holds-the-old", "after a commit, the older attempt is held and the new one freed", "memory/slot_pool.py",
        "(slot.header is None or slot.header.attempt not in held):\n",
        "(slot.header is None or slot.header.attempt in held):\n",
    ),
    Mutant(
        "held-given-away", "the trainer gets slots that hold what must be kept", "memory/slot_pool.py",
        "            is_free = slot.use is Use.FREE and not slot.drains and (",
        "            is_free = slot.taker is None and not slot.drains and (",
    ),
    Mutant(
        "failed-save-keeps-slots", "slots that a failed save was copied to stay busy", "memory/slot_pool.py",
        "            if slot.use is Use.BUSY:\n                slot.taker, slot.use = None, Use.HOLDS if committed",
        "            if slot.use is Use.BUSY and committed:\n                slot.taker, slot.use = None, Use.HOLDS if committed",
    ),
    Mutant(
        "older-never-freed", "what was kept until the heal ends is never free again", "restoring/heal.py",
        "            context.pool.free_older(home.header.attempt)\n", "",
    ),
    Mutant(
        "held-file-grows", "a slot that holds a committed step gets a larger file", "startup/grow_slots.py",
        "    return slot.use is not Use.HOLDS and not slot.drains and slot.view.nbytes",
        "    return not slot.drains and slot.view.nbytes",
    ),
    Mutant(
        "newest-slot-first", "of two free slots the one with the newer content is written", "memory/slot.py",
        "    return min((slot for slot in slots if slot.is_free)",
        "    return max((slot for slot in slots if slot.is_free)",
    ),
    # Transfer
    Mutant(
        "window-of-the-other-slot", "a Put goes to the other slot of the pair", "redundancy/partner_copies.py",
        "        return self._windows[index][nth], ",
        "        return self._windows[1 - index][nth], ",
    ),
    Mutant(
        "window-of-the-first-owner", "a Put goes to the inbox of another rank", "redundancy/partner_copies.py",
        "        nth = self._owners_of[partner].index(self._world.rank)\n", "        nth = 0\n",
    ),
    Mutant(
        "late-is-damaged", "a Put that is not visible yet counts as damaged", "redundancy/slot_transfer.py",
        "ARRIVAL_S = 30.0", "ARRIVAL_S = 0.0",
    ),
    Mutant(
        "put-trusted", "the notice of a Put is trusted: neither checked nor flushed", "redundancy/slot_transfer.py",
        "        if window is None or time.monotonic() > end:\n", "        if window is not None:\n            return True\n        if window is None:\n",
    ),
    Mutant(
        "windows-left-open", "windows expose files that slots no longer have", "startup/context.py",
        "        self.protection.close_windows()\n        borrowed: list[Slot] = []\n", "        borrowed: list[Slot] = []\n",
    ),
    # Parity
    Mutant(
        "short-block-unpadded", "what follows a short block is not zeros", "redundancy/parity_exchange.py",
        "            self._lanes[lane][nbytes:] = 0\n", "",
    ),
    Mutant(
        "lane-reused-early", "a buffer is used again while its block is still sent", "redundancy/parity_exchange.py",
        "        for nth, unit, coded in zip(task.want, task.outputs, made, strict=True):\n",
        "        self._free, lanes = self._free + lanes, []\n        for nth, unit, coded in zip(task.want, task.outputs, made, strict=True):\n",
    ),
    Mutant(
        "parity-block-shared", "all parity blocks of a row have one place", "memory/parity_layout.py",
        "True, row * self.losses + nth))", "True, row * self.losses))",
    ),
    Mutant(
        "heads-not-in-table", "the table of a parity file does not have its heads", "redundancy/parity.py",
        "        table[:first] = target.check_blocks(extents, 0, first)\n", "",
    ),
    Mutant(
        "one-loss-too-many", "as many losses as the scheme covers are refused", "memory/parity_layout.py",
        "            if len(gone) > self.losses:\n", "            if len(gone) >= self.losses:\n",
    ),
    # Restore
    Mutant(
        "inventory-of-this-node", "a rank chooses by the files of its own node", "startup/earlier_runs.py",
        "    packed = world.gather_nodes(encode(scan(memory, world.node_index)) if world.local_rank == 0 else None)\n",
        "    packed = [encode(scan(memory, world.node_index))]\n",
    ),
    Mutant(
        "slot-missing", "an attempt is chosen that has no slot for some rank", "startup/choose_checkpoint.py",
        "    if missing - rebuilt.keys() or not", "    if not slots or not",
    ),
    Mutant(
        "unverified", "slots are not verified before they are loaded", "restoring/from_memory.py",
        "                blocks = _bad_blocks(context, slots[rank], choice.group_of(rank) is not None) if checked else []\n",
        "                blocks: list[int] = []\n",
    ),
    Mutant(
        "damage-ignored", "bad blocks that parity could repair are loaded", "restoring/from_memory.py",
        "    if not bad and (damaged or choice.rebuilt):\n", "    if not bad and choice.rebuilt:\n",
    ),
    Mutant(
        "damage-not-told", "only the rank that finds a damaged slot passes it over", "restoring/from_memory.py",
        "    found = [pair for pairs in world.gather(mine) for pair in pairs]\n    bad = {",
        "    found = mine\n    bad = {",
    ),
    Mutant(
        "lost-is-never-was", "a committed step that cannot be restored counts as nothing", "restoring/choose_source.py",
        "        if reasons or there.problem:\n", "        if there.problem:\n",
    ),
    Mutant(
        "slots-not-taken-back", "a restore writes slots that belong to the trainer", "restoring/from_memory.py",
        "    context.pool.take_back()\n", "",
    ),
    Mutant(
        "adopted-without-barrier", "a file is reused before its rank has mapped it", "startup/context.py",
        "        # No file is deleted or reused before every rank of the node has attached its own.\n        world.agree([0])\n", "",
    ),
    # Heal
    Mutant(
        "heal-makes-nothing", "missing copies and parity are not made again", "restoring/heal.py",
        "        protect_again(context, home, lacking)\n        reach(\"heal.copied\")\n", '        reach("heal.copied")\n',
    ),
    Mutant(
        "heal-not-agreed", "only ranks whose copies are missing heal", "restoring/heal.py",
        "    whole = world.agree([int(not lacking)])[0]\n", "    whole = not lacking\n",
    ),
    Mutant(
        "copies-not-verified", "a damaged copy counts as whole", "redundancy/partner_copies.py",
        "any_whole(_copies_of(pool, owner, attempt), Slot.verify, what, forget)", "bool(_copies_of(pool, owner, attempt))",
    ),
    Mutant(
        "older-not-held", "after a step was rolled forward, saves may write the one before", "courier/restores.py",
        "        self._context.pool.hold_older()\n", "",
    ),
    Mutant(
        "rolled-forward-is-committed", "a step that nobody saw committed counts as committed", "restoring/from_memory.py",
        "    context.rolled_forward = bool(context.world.agree([int(not own.committed)])[0])\n",
        "    context.rolled_forward = False\n",
    ),
    Mutant(
        "one-receipt-is-enough", "whether a step was rolled forward is not agreed", "restoring/from_memory.py",
        "    context.rolled_forward = bool(context.world.agree([int(not own.committed)])[0])\n",
        "    context.rolled_forward = not own.committed\n",
    ),
    # Waits
    Mutant(
        "error-not-told", "an error of one rank is raised there only", "mpi/world.py",
        "        self.raise_together(error)\n        return results[0]\n",
        "        if error is not None:\n            raise error\n        return results[0]\n",
    ),
    Mutant(
        "freed-without-barrier", "a rank leaves while others still need it", "courier/session.py",
        "        self._world.agree([])  # a barrier: no rank leaves while others still wait for it\n", "",
    ),
]  # fmt: skip


# Running them


def run_seed(seed: int, fixed: dict[str, object]) -> list[str]:
    """Simulate a history with the mlflash that is imported; return its problems."""
    from history import History

    gc.disable()
    history = History(seed, fixed)
    history.run()
    return history.problems


def first_found(mutant: Mutant, seeds: range, fixed: dict[str, object]) -> tuple[int | None, str]:
    """Run seeds until one finds a mutant; return it, and what it says."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "mlflash"
        shutil.copytree(Path(next(iter(_spec().submodule_search_locations or ()))), package)
        path = package / mutant.file
        text = path.read_text()
        assert text.count(mutant.old) == 1, f"{mutant.name}: these lines occur {text.count(mutant.old)} times"
        path.write_text(text.replace(mutant.old, mutant.new))
        result: tuple[int | None, str] = _in_child(lambda: _search(folder, {**fixed, **mutant.fixed}, seeds), _MOST_S * len(seeds))
        return result


def _spec() -> Any:
    assert "mlflash" not in sys.modules
    return importlib.util.find_spec("mlflash")


def _search(folder: str, fixed: dict[str, object], seeds: range) -> tuple[int | None, str]:
    """Find the first seed that fails with the package in a folder, each in a process of its own."""
    sys.path.insert(0, folder)
    import machine

    machine.install()
    import history

    assert str(history.mlflash.__file__).startswith(folder)
    gc.collect()
    gc.freeze()
    for seed in seeds:
        problems: list[str] = _in_child(lambda seed=seed: run_seed(seed, fixed), _MOST_S)
        if problems:
            return seed, problems[0]
    return None, ""


def _in_child(work: Callable[[], Any], most_s: float) -> Any:
    """Do something in a forked process; return its result, or, if it is a list of problems, what went wrong."""
    import select

    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = json.dumps(work())
        except BaseException as error:
            text = json.dumps(["".join(traceback.format_exception(error))])
        with os.fdopen(into, "w") as file:
            file.write(text)
        _exit(0)
    os.close(into)
    raw, end = b"", time.time() + most_s
    while select.select([out], [], [], max(0.0, end - time.time()))[0] and (part := os.read(out, 1 << 16)):
        raw += part
    if not raw:
        os.kill(child, 9)
    os.close(out)
    os.waitpid(child, 0)
    return json.loads(raw or b'["the process hung or crashed"]')


_exit = os._exit


def one_line(text: str) -> str:
    """The line of a problem that says most: its first one, or the error at the end of a traceback."""
    lines = [line for line in text.splitlines() if line.strip()]
    return "".join(lines) if len(lines) < 3 else f"{lines[0]} ... {lines[-1]}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--courier", default="thread", choices=("thread", "process", "any"))
    args = parser.parse_args()
    fixed = {} if args.courier == "any" else {"courier": args.courier}
    sys.path[0] = str(Path(__file__).parent)
    import torch.distributed.checkpoint  # noqa: F401  # once, and not again for each mutant

    missed, firsts = [], []
    for mutant in MUTANTS:
        if args.names and mutant.name not in args.names:
            continue
        before = os.times()
        seed, said = first_found(mutant, range(args.seeds), fixed)
        after = os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        print(f"{mutant.name:28} {'-' if seed is None else seed:>5} {cpu:6.1f} s  {one_line(said)[:130]}", flush=True)
        missed += [mutant.name] if seed is None else []
        firsts += [] if seed is None else [seed]
    print(f"{len(firsts)} found, median seed {sorted(firsts)[len(firsts) // 2] if firsts else '-'}; not found: {missed}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
