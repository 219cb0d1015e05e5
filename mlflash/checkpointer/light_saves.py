"""Light saves: between two whole saves, a save keeps what the optimizers did, and a restore does it again.

A step changes weights and moments, which are most of a state, only by its gradients. They are a fifth to a quarter of
it. So a *light save* keeps the gradients and settings of the steps since the save before, and all else of the state as
it is now (the *rest*: schedules, scalers, random generators, counters, buffers). It is an ordinary save of another
Checkpointer, which has as many slots as there are light saves that may be needed, so it is protected, committed and
verified like any other. A restore takes the newest whole save, repeats the steps of each light save after it by the
optimizer's own code, and fills in the rest of the last one.

A light save carries digests of the tensors that the optimizers own, before and after its steps. If what was repeated
differs, the restore ends at the light save before. So a restore gives the bits of a step that was saved, or an older
one. During the first light saves of a run, a copy of the optimizers makes each step as well (`Shadow`), so that a
device on which a repeated step is not exact is found before it is needed.

What decides whether a save is light is the same on all ranks: counts, and how earlier saves ended. A rank that cannot
save what the others save lets that save fail, on all ranks; the next one is whole.

Source: Checkmate (2507.13522) and LowDiff (2509.04084) keep gradients in the place of states.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import xxhash

from ..config import LIGHT_MARGIN, history_of_light
from ..errors import CorruptSlot, SaveFailed, StepNotFound, WorldSizeChanged, text_of
from ..memory.inventory import WantedStep
from ..save.deferred_copies import Computed
from ..save.lazy_saves import Memory, is_worth_deferring, local
from ..save.repeated_steps import Digest, Shadow, Step, Tape, optimizers_in, repeat, tensors_of
from ..save.snapshot import Snapshot, has_committed
from ..state.flatten import Flattener
from ..state.leaves import Entry, Flat, Structure, as_bytes
from ..state.manifest import encode_entries, encode_tree
from ..state.rebuild import Filling
from ..text import LIGHT

if TYPE_CHECKING:
    from .checkpointer import Checkpointer

log = logging.getLogger("mlflash")

_TRIES = 3  # light saves that may fail before all saves are whole
_ONCE, _FOR_GOOD = "it cannot be light, and the next save is whole", "no save can be light, and all are whole now"
_AFTER, _NOT_YET = "checksum of weights", 0  # a leaf: what is true after the steps; until it is made
_NO_OPTIMIZER = "no torch optimizer is in the state"


def add_to(whole: Checkpointer, comm: Any, process_group: Any, replicated: Any, domains: Any) -> LightSaves:
    """Make the light saves of a Checkpointer. Collective over comm. The arguments are those of the Checkpointer."""
    config = whole._config
    settings = dataclasses.replace(
        config, job=config.job + LIGHT, light=0, history=history_of_light(config.light), history_every_s=0.0,
        directory=None, drain_every=0, certify_after=0, prefer_certified=False, check_values=0, reserve=0,
        when_busy="wait", strict=False, metrics="", heartbeat=False,
    )  # fmt: skip
    if isinstance(replicated, Mapping):
        replicated = {f"grads.*.{pattern}": ranks for pattern, ranks in replicated.items()}
    elif replicated is not None:
        replicated = {"grads.*": replicated}
    lane = object.__new__(type(whole))
    lane._open(settings, comm, process_group, replicated, domains)
    return LightSaves(whole, lane, config.light)


class LightSaves:
    """Saves and restores for a Checkpointer with ``light`` above 0.

    Args:
        whole: makes the whole saves.
        lane: the Checkpointer of the light saves.
        most: how many saves may be light between two whole ones.
    """

    def __init__(self, whole: Checkpointer, lane: Checkpointer, most: int):
        self._whole, self.lane, self._most = whole, lane, most
        self._margin = 0  # saves after the last whole one, at which it must have ended
        self._flattener, self._content_flattener = Flattener(), Flattener()
        self._tape: Tape | None = None
        self._shadow: Shadow | None = None
        self._checks = True  # whether a copy of the optimizers will repeat steps from the next whole save on
        self._inexact = ""  # what this copy had other bits of
        self._since: int | None = None  # saves since the last whole one; None: there is none, or none after a failure
        self._base: Snapshot | None = None  # the whole save, until it is known how it ended
        self._last: Snapshot | None = None  # the last light save
        self._before: tuple[int, Digest] | None = None  # step and digest of the save before
        self._owned: _Owned | None = None
        self._failures = 0  # light saves that failed one after the other

    def save(self, step: int, state: Any, until: Any) -> Snapshot:
        """Save as `Checkpointer.save` does, if possible lightly."""
        is_due = self._is_due()
        if self._failures >= _TRIES:
            self._leave()
            return self._whole._saves.save(step, state, until)
        tape = self._follow(state)
        digest, light = Digest(tape.optimizers, step), None
        if self._since is not None:
            light = self._last = self._save_light(step, state, tape, digest, until is not None)
        if light is None or light.later is None:
            digest.make()  # nothing else does before weights change
        if self._shadow is not None and not tape.problem():
            self._check(tape.steps)
        elif self._shadow is not None:  # it lacks steps now: another one begins at the next whole save
            self._shadow, self._checks = None, True
        tape.clear()  # the next light save continues from here
        self._before = step, digest
        if is_due:
            self._margin = 0 if light is None else min(LIGHT_MARGIN, self._most)  # steps are not lost meanwhile
            self._since, self._base = 0, self._whole._saves.save(step, state, until)
            self._begin_check(tape)
            return self._base
        assert light is not None and self._since is not None
        self._since += 1
        self._whole._saves.last_step = light.step
        self._whole._saves.after_save(light)
        return light

    def _is_due(self) -> bool:
        """Whether this save must be whole. The same on all ranks: it waits for what it depends on."""
        if self._last is not None:
            is_good = has_committed(self._last)
            is_for_good = _FOR_GOOD in str(self._last.error)  # the same on all ranks
            self._failures = 0 if is_good else _TRIES if is_for_good else self._failures + 1
            if not is_good:
                self._since = None  # what comes after it cannot be repeated
        self._last = None
        if self._base is not None and (self._since is None or self._since >= self._margin):
            if not has_committed(self._base):
                self._since = None
            self._base = None
        return self._since is None or self._since >= self._most

    def _follow(self, state: Any) -> Tape:
        """Note the steps of the optimizers that are in a state."""
        optimizers = optimizers_in(state)
        if self._tape is None or list(map(id, self._tape.optimizers)) != list(map(id, optimizers)):
            if self._tape is not None:
                self._tape.close()
            self._tape, self._before, self._owned = Tape(optimizers), None, None
        return self._tape

    def _save_light(self, step: int, state: Any, tape: Tape, digest: Digest, is_lazy: bool) -> Snapshot:
        is_lazy, lazy = is_lazy and self.lane._saves.lazy.hears(tape.optimizers), None
        try:
            flat, why = self._take_apart(state, tape, _NOT_YET if is_lazy else digest.value)
            if flat is not None and is_lazy:
                lazy = _deferred(flat, digest, with_gradients=tape.keeps_gradients)
        except Exception as error:  # of an object in the state, or of an optimizer
            flat, why = None, text_of(error)
        if flat is None:
            is_for_good = why in (_NO_OPTIMIZER, self._inexact, tape.why_not)
            return self.lane._saves.fail(step, SaveFailed(f"{_FOR_GOOD if is_for_good else _ONCE}: {why}"))
        return self.lane._saves.save_flat(step, flat, lazy)

    def _take_apart(self, state: Any, tape: Tape, after: int) -> tuple[Flat | None, str]:
        """Give what a light save has, taken apart; or None, and why there is none."""
        why = _NO_OPTIMIZER if not tape.optimizers else self._inexact or tape.problem()
        if why or self._before is None:
            return None, why or "the state has other optimizers than before"
        flat = self._flattener.flatten(state)
        known, owned = self._owned, self._owned_in(flat, tape)
        if known is not None and owned.around != known.around:
            return None, "the structure of the state has changed"
        names, (step_before, before) = owned.names, self._before
        return self._content_flattener.flatten({
            _AFTER: np.array([after]), "before": [step_before, before.value],
            "structure": owned.digest, "around": owned.around, "plain": json.dumps(flat.plain),
            "steps": [{"optimizer": s.optimizer, "groups": s.groups, "scaler": s.scaler} for s in tape.steps],
            "grads": {str(number): {names[id(p)]: grad for p, grad in _pairs(s, tape.optimizers) if grad is not None}
                      for number, s in enumerate(tape.steps)},
            "rest": {flat.structure.entries[n].name: flat.values[n] for n in owned.rest},
        }), ""  # fmt: skip

    def _owned_in(self, flat: Flat, tape: Tape) -> _Owned:
        """What the optimizers own of a state, as it was found for one of the same structure."""
        if self._owned is None or self._owned.structure is not flat.structure:
            self._owned = _Owned(flat, tape.optimizers)
        return self._owned

    # Whether repeated steps are exact here

    def _begin_check(self, tape: Tape) -> None:
        if not self._checks or not tape.optimizers or tape.why_not:
            return
        self._checks = False
        try:
            self._shadow = Shadow(tape.optimizers)
        except Exception as error:  # it takes memory
            log.info("whether repeated steps are exact here was not checked: %s", error)

    def _check(self, steps: Sequence[Step]) -> None:
        assert self._shadow is not None
        try:
            self._shadow.repeat(steps)
            differs = self._shadow.differs()
        except Exception as error:  # an optimizer may do anything
            differs = f"an error: {error}"
        if differs:
            self._inexact = f"a step that was made again on this device gave other bits, the first in {differs}"
        if differs or (self._since is not None and self._since + 1 >= self._most):
            self._shadow = None

    # Restoring

    def restore(self, state: Any, wanted: WantedStep) -> int | None:
        """Restore the newest whole save that fits, and repeat the steps of the light saves after it.

        Collective over comm. Arguments and exceptions are those of `Checkpointer.restore`.
        """
        self._since = self._base = self._last = None
        end, whole = None if wanted.before is None else wanted.before - 1, wanted
        if wanted.certified:
            end = -1
        elif wanted.step is not None:
            end = wanted.step
            if end not in self._whole._restores.steps():
                whole = WantedStep(before=end)
        restore_whole: Callable[[], int | None] = lambda: self._whole._restores.restore(state, whole, None)
        base = restore_whole()
        if base is None:
            return None
        self.lane._saves.last_step = reached = self._restore_from(base, state, restore_whole, end)
        if reached != base and wanted.is_newest:  # copies that were lost of light saves are not made again
            self._whole._saves.last_step = base
            self._since, self._base, self._margin = 0, self._whole._saves.save(reached, state, None), 0
        if wanted.step not in (None, reached):
            raise StepNotFound("this step is neither in memory nor in the directory, and cannot be made again",
                               step=wanted.step, found=f"step {reached}, which is in the state now")  # fmt: skip
        return reached

    def _restore_from(self, base: int, state: Any, restore_whole: Callable[[], int | None], end: int | None) -> int:
        while True:
            reached, is_clean = self._repeat(state, base, end)
            if is_clean:
                return reached
            log.warning("the step after %d had other bits when it was made again: training goes on from step %d",
                        reached, reached)  # fmt: skip
            end = reached
            if restore_whole() != base:
                raise CorruptSlot("the whole save is not there any more that was restored a moment ago", step=base)

    def _repeat(self, state: Any, base: int, last: int | None) -> tuple[int, bool]:
        """Repeat what follows a whole save. Return the step that was reached, and whether the state is that of it."""
        tape, lane = self._follow(state), self.lane
        ranks = lane._trainer.ranks
        reached, content = base, None
        saves = self._whole._saves
        saves.undefined = "steps that were saved lightly were not all made again"
        with tape.paused():
            for step in lane.steps():
                if step <= base or (last is not None and step > last):
                    continue
                try:
                    found = lane._restores.look_at(step)
                except (WorldSizeChanged, StepNotFound) as error:
                    log.warning("step %d cannot be made again: %s", step, error)
                    break
                follows = found["before"] == [reached, Digest(tape.optimizers, reached).value]
                if not ranks.all_of(follows and self._owned_now(state).around == found["around"]):
                    break
                self._make(found, tape.optimizers)
                is_as_saved = (
                    Digest(tape.optimizers, step).value == found[_AFTER]
                    and self._owned_now(state).digest == found["structure"]
                )
                if not ranks.all_of(is_as_saved):
                    return reached, False
                reached, content = step, found
            if content is not None:
                self._fill(state, reached, content)
        saves.undefined = ""
        saves.last_step = reached
        self._before = reached, Digest(tape.optimizers, reached).make()
        if reached != base and not ranks.rank:
            log.info("made the steps after %d again, up to step %d", base, reached)
        return reached, True

    def _owned_now(self, state: Any) -> _Owned:
        return self._owned_in(self._flattener.flatten(state), self._follow(state))

    def _make(self, found: dict[str, Any], optimizers: Sequence[Any]) -> None:
        assert self._owned is not None
        names = self._owned.names
        for number, kept in enumerate(found["steps"]):
            grads = found["grads"][str(number)]
            groups = optimizers[kept["optimizer"]].param_groups
            of_groups = [[grads.get(names[id(parameter)]) for parameter in group["params"]] for group in groups]
            repeat(Step(kept["optimizer"], kept["groups"], of_groups, kept["scaler"]), optimizers)

    def _fill(self, state: Any, step: int, found: dict[str, Any]) -> None:
        """Fill in the rest: what optimizers own is left as it is."""
        flat = self._flattener.flatten(state)
        structure, starts = flat.structure, list[int]()
        for number, tie in enumerate(structure.ties):  # an entry is known by where it begins
            starts.append(number if tie < 0 else starts[tie])
        entries = tuple(
            map(lambda entry, start: msgspec.structs.replace(entry, start=start), structure.entries, starts)
        )

        def read(entry: Entry) -> Any:
            value = found["rest"].get(entry.name)
            return as_bytes(flat.values[entry.start].detach().cpu().contiguous() if value is None else value)

        filling = Filling(state, structure.tree, entries, json.loads(found["plain"]), read)
        self._whole._restores._loading.fill(step, filling)

    def steps(self) -> list[int]:
        """List the steps of light saves in memory. Collective over comm."""
        return self.lane.steps()

    def close(self) -> None:
        """Wait for the light saves so far, and leave the optimizers alone. Collective over comm."""
        self._leave()
        self.lane.close()

    def abandon(self, timeout_s: float) -> bool:
        """See `Checkpointer.abandon`."""
        self._leave()
        return self.lane.abandon(timeout_s)

    def _leave(self) -> None:
        if self._tape is not None:
            self._tape.close()
        self._tape = self._shadow = None


def _deferred(flat: Flat, digest: Digest, with_gradients: bool) -> dict[int, Any]:
    """What of a light save is copied later, see `Staging.copy`: the digest after the step, and gradients."""
    deferred: dict[int, Any] = {}
    for number, entry in enumerate(flat.structure.entries):
        value = flat.values[number]
        if entry.name == _AFTER:
            deferred[number] = Computed(lambda: np.array([digest.value]), digest.weights)
        elif with_gradients and entry.name.startswith("grads.") and is_worth_deferring(value):
            deferred[number] = value
    return deferred


class _Owned:
    """What of a state its optimizers own, and what is left.

    Attributes:
        rest: numbers of the leaves that no optimizer owns.
        names: for each parameter of an optimizer, by its id, the name of its leaf.
        digest: of names, shapes and order of all leaves.
        around: the same, without what the optimizers own: they may make that at their first step.
    """

    def __init__(self, flat: Flat, optimizers: Sequence[Any]):
        self.structure: Structure = flat.structure
        memory = Memory(tensors_of(optimizers))
        owners = [memory.owner_of(value) if _is_plain(value) else None for value in flat.values]
        self.rest = [number for number, owner in enumerate(owners) if owner is None]
        named = {id(owner): flat.structure.entries[n].name for n, owner in reversed(list(enumerate(owners)))
                 if owner is not None}  # fmt: skip
        self.names: dict[int, str] = {}
        for number, optimizer in enumerate(optimizers):
            for place, group in enumerate(optimizer.param_groups):
                for at, parameter in enumerate(group["params"]):
                    self.names[id(parameter)] = named.get(id(local(parameter)), f"{number} {place} {at}")
        entries, tree = flat.structure.entries, flat.structure.tree
        self.digest = xxhash.xxh3_64_hexdigest(encode_entries(entries) + encode_tree(tree))
        names = {number: entries[number].name for number in self.rest}
        around = json.dumps(_without_others(tree, names)).encode()
        self.around = xxhash.xxh3_64_hexdigest(encode_entries(tuple(entries[number] for number in self.rest)) + around)


def _without_others(tree: Any, names: Mapping[int, str]) -> Any:
    """A tree with names of its leaves, without other leaves than these, and without containers that are empty then."""
    tag, *more = tree
    if tag == "e":
        return names.get(more[0])
    if tag in ("o", "k"):
        inner = _without_others(more[0], names)
        return None if inner is None else [tag, inner, *more[1:]]
    if tag == "d":
        items = [[key, inner] for key, sub in more[0] if (inner := _without_others(sub, names)) is not None]
        return ["d", items] if items else None
    if tag in ("l", "t"):
        subs = [inner for sub in more[0] if (inner := _without_others(sub, names)) is not None]
        return [tag, subs] if subs else None
    return tree


def _is_plain(value: Any) -> bool:
    torch = sys.modules["torch"]
    return isinstance(value, torch.Tensor) and value.is_contiguous() and not (value.is_conj() or value.is_neg())


def _pairs(step: Step, optimizers: Sequence[Any]) -> Sequence[tuple[Any, Any]]:
    groups = optimizers[step.optimizer].param_groups
    return [pair for group, grads in zip(groups, step.grads, strict=True)
            for pair in zip(group["params"], grads, strict=True)]  # fmt: skip
