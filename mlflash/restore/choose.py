"""Memory or a directory: which checkpoint a restore takes, and what it reports if nothing can be used."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ..courier.state import CourierState
from ..drain.checkpoint_directory import Listed, Listing, step_of
from ..drain.queue import DrainQueue
from ..errors import StepNotFound, Unrestorable
from ..memory.commit_records import MOST_STEPS
from ..memory.inventory import Place
from ..memory.slot import Verdict
from ..memory.wanted_step import WantedStep
from ..protect.rank_checkpoint import RankCheckpoint
from ..storage.store import Store, find_other_format, open_store
from . import fetch
from .open_in_memory import FoundElsewhere

log = logging.getLogger("mlflash")

_NAMED = 4  # steps that are lost, in one line


class Sources:
    """Chooses what the courier restores."""

    def __init__(self, context: CourierState, drains: DrainQueue):
        self._context, self._drains = context, drains

    def choose(self, wanted: WantedStep, others: bool, source: str | None, bad: Mapping[str, str], checked: bool
               ) -> RankCheckpoint | FoundElsewhere | Listed | None:  # fmt: skip
        """Choose between memory and directory: what was saved last. Collective over the world.

        ``bad``: folders of the directory that are passed over, and why. ``checked``: verify every byte in memory.
        Raises Unrestorable or StepNotFound on all ranks; nothing was changed.
        """
        if wanted.is_newest and self._context.config.prefer_certified:
            try:
                found = self._choose(WantedStep(certified=True), others, source, bad, checked)
            except StepNotFound:
                found = None
            if found is not None:
                return found
            if self._context.world.rank == 0:
                log.warning("no step is certified: the newest one is taken (prefer_certified)")
        return self._choose(wanted, others, source, bad, checked)

    def _choose(self, wanted: WantedStep, others: bool, source: str | None, bad: Mapping[str, str], checked: bool
                ) -> RankCheckpoint | FoundElsewhere | Listed | None:  # fmt: skip
        store = self._drains.store if source is None else open_store(source)
        there = self._drains.look(store)
        listed = [one for one in there.listed if wanted.fits(one.step, one.verdict)]
        struck: dict[Place, str] = {}
        left = [one for one in listed if one.folder not in bad]
        if source is None:
            oldest = left[0].card.attempt.generation if left else 0
            found = fetch.find_and_verify(self._context, wanted, others, oldest, checked, struck)
            if found is not None:
                self._context.looked = True
                return found
        if left and store is not None:
            if struck and not self._context.left.unusable:  # keep what memory has: the directory may be damaged, too
                self._context.leave_alone()
            self._say_why(left[0], f"{store.path}/{left[0].folder}", wanted, source, struck)
            return left[0]
        self._refuse_unusable(wanted, source, there, bad, struck)
        self._say_what_others_wrote(store)
        self._context.looked = True
        return None

    def _say_what_others_wrote(self, store: Store | None) -> None:
        """Warn of checkpoints of other libraries in the directory: training would begin anew without a word."""
        if store is None or self._context.world.rank != 0 or self._context.config.fresh:
            return
        if (found := find_other_format(store)) is not None:
            log.warning("nothing is restored, but %s has a checkpoint of %s. mlflash restores what it saved itself: "
                        "load that checkpoint as before, or see mlflash import", *found)  # fmt: skip

    def _refuse_unusable(self, wanted: WantedStep, source: str | None, there: Listing, bad: Mapping[str, str],
                         struck: Mapping[Place, str]) -> None:  # fmt: skip
        """Raise if there are checkpoints, but none of them can be used. Collective over the world."""
        reasons, begun = fetch.why_not(self._context, struck) if source is None else ({}, [])
        in_memory = bool(reasons)
        marked = {one.folder: "it was marked bad" for one in there.listed if one.verdict is Verdict.BAD}
        for folder, why in {**marked, **there.damaged, **bad}.items():
            at = step_of(folder)
            if at is not None and (at in reasons or len(reasons) < MOST_STEPS):
                reasons[at] = "; ".join(filter(None, (reasons.get(at), f"{folder}: {why}")))
        held = [] if source is not None or wanted.is_newest else fetch.restorable_steps(self._context)
        if not wanted.is_newest and (wanted.step is not None or held or there.listed):
            step = wanted.step
            drained = sorted({one.step for one in there.listed if one.folder not in bad})
            store = self._drains.store if source is None else open_store(source)
            in_store = f", in {store.path}: {there.problem or drained}" if store is not None else ""
            why = "this step cannot be restored" if step is not None else f"there is no step that is {wanted}"
            if step in reasons:
                why = f"this step exists but cannot be restored: {reasons[step]}"
            raise StepNotFound(why, step=step,
                               found=f"steps in memory: {held}{in_store}")  # fmt: skip
        if reasons or there.problem:
            error = Unrestorable(
                (f"{there.problem}, and memory has nothing that can be restored" if there.problem else
                 "there are checkpoints, but none of them can be restored")
                + ": nothing was deleted. Start again when the missing nodes or files are back, or begin anew "
                  "with Checkpointer(fresh=True) or MLFLASH_FRESH=1",
                reasons=reasons,
            )  # fmt: skip
            if in_memory:
                self._context.leave_alone()
            self._context.recorder.unrestorable(error)
            raise error
        if begun and self._context.world.rank == 0:
            log.warning("memory has parts of step %s, whose first save did not end: nothing was ever committed",
                        ", ".join(map(str, begun)))  # fmt: skip

    def _say_why(self, listed: Listed, path: str, wanted: WantedStep, source: str | None, struck: Mapping[Place, str]
                 ) -> None:  # fmt: skip
        """Log why the directory is taken, and which newer steps are lost by that. Collective over the world."""
        self._context.restored.source, self._context.restored.rolled_forward = path, False
        lost: dict[int, str] = {}
        if source is not None or not wanted.is_newest:
            why = "as asked"
        else:
            held = fetch.restorable_steps(self._context)
            reasons, _ = fetch.why_not(self._context, struck)
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
