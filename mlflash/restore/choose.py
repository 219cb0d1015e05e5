"""The checkpoint that a restore takes: the newest whole one in memory, or one of a directory.

    list         each node lists its sealed slots; all ranks make the same choice
    fetch        every byte of every slot is verified, and slots come to where they can be read (see `fetch`)
    (load)       by the caller, from its own slot; the ranks agree on an error there, too
    reprotect    copies and parity are checked, and made if they are missing (see `repair`)

A slot that is found to be bad is removed from the list and the choice is made again, so that all ranks always take the
same attempt. If nothing can be used, the error says what exists and why.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

from ..channel.records import Search
from ..commit.courier_state import CourierState
from ..commit.earlier_runs import Choice, choose
from ..crash_points import reach
from ..drain.checkpoint_directory import Listed, Listing, step_of
from ..drain.drain_handle import Drain
from ..drain.drain_runs import DrainQueue
from ..drain.rank_content import DrainInput
from ..errors import StepNotFound, Unrestorable, WorldSizeChanged
from ..memory.inventory import MOST_STEPS, NEWEST, Place, WantedStep, why_unrestorable
from ..memory.slot import Slot, Verdict
from ..protect.rank_checkpoint import ShareFiles, open_rank_checkpoint
from ..storage.store import Store, find_other_format, open_store
from .fetch import bring, copy_to_memory, gather_shares, is_of
from .open_in_memory import MemoryCheckpoint
from .repair import give_receipts, reprotect

log = logging.getLogger("mlflash")

_NAMED = 4  # steps that are lost, in one line


class Sources:
    """Chooses what the courier restores."""

    def __init__(self, context: CourierState, drains: DrainQueue):
        self._context, self._drains = context, drains

    def choose(self, search: Search) -> MemoryCheckpoint | Listed | None:
        """Choose between memory and directory: what was saved last. Collective over the world.

        Raises Unrestorable or StepNotFound on all ranks; nothing was changed.
        """
        if search.wanted.is_newest and self._context.config.prefer_certified:
            try:
                certified = self._choose(dataclasses.replace(search, wanted=WantedStep(certified=True)))
            except StepNotFound:
                certified = None
            if certified is not None:
                return certified
            if self._context.world.rank == 0:
                log.warning("no step is certified: the newest one is taken (prefer_certified)")
        return self._choose(search)

    def _choose(self, search: Search) -> MemoryCheckpoint | Listed | None:
        context, wanted = self._context, search.wanted
        store = self._drains.store
        if (source := search.source) is not None:
            store = context.world.on_all(lambda: open_store(source))
        listing = self._drains.listing(store)
        usable = [
            checkpoint for checkpoint in listing.listed
            if wanted.fits(checkpoint.step, checkpoint.verdict) and checkpoint.folder not in search.bad
        ]  # fmt: skip
        rejected: dict[Place, str] = {}
        if search.source is None:
            oldest = usable[0].card.attempt.generation if usable else 0
            in_memory = find_and_verify(context, search, oldest, rejected)
            if in_memory is not None:
                self._context.has_searched = True
                return in_memory
        if usable and store is not None:
            if rejected and not context.left.unusable:  # keep what memory has: the directory may be damaged, too
                context.leave_alone()
            self._say_why(usable[0], f"{store.path}/{usable[0].folder}", search, rejected)
            return usable[0]
        self._refuse_unusable(search, store, listing, rejected)
        self._say_what_others_wrote(store)
        self._context.has_searched = True
        return None

    def _refuse_unusable(self, search: Search, store: Store | None, listing: Listing, rejected: Mapping[Place, str]
                         ) -> None:  # fmt: skip
        """Raise if there are checkpoints, but none of them can be used. Collective over the world."""
        wanted, bad, uses_memory = search.wanted, search.bad, search.source is None
        reasons, unfinished = why_not(self._context, rejected) if uses_memory else ({}, [])
        in_memory = bool(reasons)
        marked = [checkpoint.folder for checkpoint in listing.listed if checkpoint.verdict is Verdict.BAD]
        for folder, why in {**dict.fromkeys(marked, "it was marked bad"), **listing.damaged, **bad}.items():
            at = step_of(folder)
            if at is not None and (at in reasons or len(reasons) < MOST_STEPS):
                reasons[at] = "; ".join(filter(None, (reasons.get(at), f"{folder}: {why}")))
        held = restorable_steps(self._context) if uses_memory and not wanted.is_newest else []
        if not wanted.is_newest and (wanted.step is not None or held or listing.listed):
            step = wanted.step
            drained = sorted({checkpoint.step for checkpoint in listing.listed if checkpoint.folder not in bad})
            in_store = f", in {store.path}: {listing.problem or drained}" if store is not None else ""
            why = "this step cannot be restored" if step is not None else f"there is no step that is {wanted}"
            if step in reasons:
                why = f"this step exists but cannot be restored: {reasons[step]}"
            raise StepNotFound(why, step=step, found=f"steps in memory: {held}{in_store}")
        if reasons or listing.problem:
            error = Unrestorable(
                (f"{listing.problem}, and memory has nothing that can be restored" if listing.problem else
                 "there are checkpoints, but none of them can be restored")
                + ": nothing was deleted. Start again when the missing nodes or files are back, or begin anew "
                  "with Checkpointer(fresh=True) or MLFLASH_FRESH=1",
                reasons=reasons,
            )  # fmt: skip
            if in_memory:
                self._context.leave_alone()
            self._context.recorder.unrestorable(error)
            raise error
        if unfinished and self._context.world.rank == 0:
            log.warning("memory has parts of step %s, whose first save did not end: nothing was ever committed",
                        ", ".join(map(str, unfinished)))  # fmt: skip

    def _say_what_others_wrote(self, store: Store | None) -> None:
        """Warn of checkpoints of other libraries in the directory: training would begin anew without a word."""
        if store is None or self._context.world.rank != 0 or self._context.config.fresh:
            return
        if (other := find_other_format(store)) is not None:
            log.warning("nothing is restored, but %s has a checkpoint of %s. mlflash restores what it saved itself: "
                        "load that checkpoint as before, or see mlflash import", *other)  # fmt: skip

    def _say_why(self, listed: Listed, path: str, search: Search, rejected: Mapping[Place, str]) -> None:
        """Log why the directory is taken, and which newer steps are lost by that. Collective over the world."""
        self._context.restored.source, self._context.restored.rolled_forward = path, False
        lost: dict[int, str] = {}
        if search.source is not None or not search.wanted.is_newest:
            why = "as asked"
        else:
            held = restorable_steps(self._context)
            reasons, _ = why_not(self._context, rejected)
            lost = {step: reason for step, reason in reasons.items() if step > listed.step}
            why = f"memory has only older steps: {held}" if held else "memory has nothing that can be restored"
        if self._context.world.rank == 0:
            if lost:
                text = "; ".join(f"step {step}: {reason}" for step, reason in list(lost.items())[:_NAMED])
                log.warning("memory has newer steps that cannot be restored, and step %d of %s is taken (%s). To "
                            "get the newer steps back, end this job before it saves, and do not start it again until "
                            "they can be read: it would continue from step %d and overwrite them",
                            listed.step, path, text, listed.step)  # fmt: skip
            log.info("restoring step %d from %s: %s", listed.step, path, why)


# Memory


def restorable_steps(context: CourierState, alike: bool = False) -> list[int]:
    """List the steps for which some node has every rank's slot, ascending. Collective over the world."""
    inventory = context.take_stock()
    return sorted({
        step
        for attempt, step, size in inventory.attempts()
        if (not alike or size == context.world.size) and choose(inventory.of(attempt), context.world.topology.node_of)
    })  # fmt: skip


def find_and_verify(context: CourierState, search: Search, oldest: int = 0, rejected: dict[Place, str] | None = None
                    ) -> MemoryCheckpoint | None:  # fmt: skip
    """Bring the newest restorable attempt that fits the request to where it can be read. Collective.

    Args:
        oldest: pass over attempts of a smaller generation, because there is something newer elsewhere.
        rejected: gets the files that were found to be damaged, and how; the same on all ranks.

    Returns:
        What this rank has of it, every byte verified on every rank; None if there is nothing.

    Raises:
        WorldSizeChanged: another number of ranks saved it, and it must not be resharded.
    """
    context.pool.exchange()
    inventory, wanted = context.take_stock(), search.wanted
    on_disk: dict[Place, Place] = {}  # of files that were copied to memory, where they were
    damaged: set[Place] = set()
    reach("restore.listed")
    while True:
        newer = inventory.without(on_disk.values()).since(oldest)
        node_of, is_free = context.world.topology.node_of, wanted.is_newest
        skip_stuck, skip_suspect = context.config.skip_stuck * is_free, context.config.on_suspect == "keep" and is_free
        choice = choose(newer, node_of, wanted, skip_stuck, skip_suspect)
        passed_over = choose(newer, node_of, wanted) if skip_stuck or skip_suspect else choice
        if choice is None:
            return None
        same_ranks = choice.world_size == context.world.size
        if not same_ranks and not search.others:
            raise WorldSizeChanged(
                "another number of ranks saved the checkpoint in memory: restore(state) converts it to this number. To "
                "ignore it, use another job name, `fresh` or `mlflash clean`",
                step=choice.step, expected=f"a world of {choice.world_size} ranks", found=f"{context.world.size}",
            )  # fmt: skip
        if copied := copy_to_memory(context, choice):
            on_disk |= copied
            inventory = context.take_stock().without(damaged)
            continue
        slots: dict[int, Slot] = {}
        bad = bring(context, inventory, choice, slots, search.checked)
        if not bad:
            if same_ranks:
                own = next(slot for slot in context.pool.own if is_of(slot, context.world.rank, choice.attempt))
                slots = {context.world.rank: own}
            files, lacking = gather_shares(context, choice, slots, search.checked)
            bad = dict.fromkeys(lacking, "the tensors that it shares with other ranks are damaged or missing")
        if bad:
            context.pool.unmap_others(slots.values())
            bad |= {on_disk[place]: why for place, why in bad.items() if place in on_disk}
            damaged |= bad.keys()
            inventory = inventory.without(bad)
            if rejected is not None:
                rejected |= bad
            continue
        if context.world.rank == 0:
            _warn(choice, passed_over, skip_stuck)
        return _opened(context, choice, slots, files)


def _warn(choice: Choice, passed_over: Choice | None, skip_stuck: int) -> None:
    """Log why the newest attempt is not taken, or what is wrong with the one that is taken."""
    if passed_over is not None and passed_over.attempt != choice.attempt:
        if skip_stuck and passed_over.restores >= skip_stuck:
            log.warning(
                "step %d was restored %d times and nothing newer was committed since: step %d is taken instead "
                "(skip_stuck=%d)", passed_over.step, passed_over.restores, choice.step, skip_stuck,
            )  # fmt: skip
        else:
            log.warning("the values of step %d were suspect when it was saved: step %d is taken instead "
                        "(on_suspect='keep')", passed_over.step, choice.step)  # fmt: skip
    if choice.verdict is Verdict.SUSPECT:
        log.warning("step %d is restored, and its values were suspect when it was saved: restore(before=%d) takes an "
                    "older one", choice.step, choice.step)  # fmt: skip
    elif choice.verdict is Verdict.BAD:
        log.warning("step %d is restored, which was marked bad", choice.step)


def _opened(context: CourierState, choice: Choice, slots: Mapping[int, Slot], files: ShareFiles) -> MemoryCheckpoint:
    restored, world = context.restored, context.world
    restored.restores, restored.verdict = choice.restores + 1, choice.verdict
    homes = {
        rank: open_rank_checkpoint(context.pool.open, world.node_index, slot, files) for rank, slot in slots.items()
    }
    own = homes[world.rank] if choice.world_size == world.size else None
    if own is None:
        restored.source, restored.rolled_forward = "other ranks", False
    else:
        place = choice.source[world.rank]
        restored.source = "parity" if place is None else world.topology.node_names[place[0]]
        restored.rolled_forward = not world.any_of(own.slot.committed)
        if not restored.rolled_forward:
            give_receipts(own.slot)
    return MemoryCheckpoint(choice.attempt, choice.step, restored.restores, homes, files, own)


def why_not(context: CourierState, rejected: Mapping[Place, str]) -> tuple[dict[int, str], list[int]]:
    """Return why each committed step in memory cannot be restored, newest first; and the steps whose saves did not end.

    Collective over the world.
    """
    floor = context.floor
    traces = [trace for trace in context.find_traces() if trace.attempt is None or trace.attempt.generation >= floor]
    reasons = why_unrestorable(traces, rejected, context.world.topology.node_names)
    return reasons, sorted({trace.step for trace in traces if trace.step >= 0} - reasons.keys())


def count_restore(context: CourierState, home: Slot) -> None:
    """Count, once per run, that a run has restored this attempt, and warn if other runs have done so before.

    The count is stored with the slot; a newer commit begins a new one.
    """
    header = home.header
    assert header is not None
    if header.attempt == context.restored.counted:
        return
    context.restored.counted = header.attempt
    home.record_restores(header.attempt, context.restored.restores)
    if context.restored.restores > 1 and context.world.rank == 0:
        log.warning(
            "step %d was restored %d times now and nothing newer was committed since: if training always fails at the "
            "same place, Checkpointer(skip_stuck=%d) takes the step before it",
            header.step, context.restored.restores, context.restored.restores,
        )  # fmt: skip


# Without training, on any number of processes: each can hand in the state of several ranks of the job. Lost slots are
# first rebuilt from copies or parity, and stay in memory.


def scavenge(context: CourierState, drains: DrainQueue) -> Drain | None:
    """Begin to drain the newest checkpoint that memory has; None if the directory has it. Collective over the world."""
    listed = drains.listing().listed
    restorable = (checkpoint for checkpoint in listed if NEWEST.fits(checkpoint.step, checkpoint.verdict))
    newest = max((checkpoint.card.attempt.generation for checkpoint in restorable), default=0)
    checkpoint = find_and_verify(context, Search(NEWEST, others=True), oldest=newest + 1)
    if checkpoint is None:
        return None
    homes = checkpoint.homes
    headers = [home.header for home in homes.values()]
    agreed = context.world.agree(max_of={"world_size": max((header.world_size for header in headers), default=0),
                                         "mark": max((header.mark for header in headers), default=0)})  # fmt: skip
    drain_input = DrainInput(checkpoint.attempt, checkpoint.step, agreed.world_size, lambda: homes, agreed.mark,
                             by="scavenge", verdict=lambda: context.restored.verdict)  # fmt: skip
    return drains.begin(drain_input)


def reprotect_newest(context: CourierState) -> int | None:
    """Make what the newest checkpoint in memory lacks, on as many ranks as the job has; return its step."""
    checkpoint = find_and_verify(context, Search(NEWEST))
    if checkpoint is None or checkpoint.own is None:
        return None
    reprotect(context, checkpoint.own.slot)
    return checkpoint.step
