"""A training that is killed at a named point: restores, does what it is told to, and notes what it restored.

The state is another one for every rank, step and launch, so that no mixture of two attempts passes for either of them.
Part of it is the same on all ranks and stored once; rank 1 has much more of its own than the others, so that a copy of
its slot is still on its way when those of the others have arrived.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import damage
import numpy as np
import records
from records import OUT
from traps import set_traps
from waiting import PATIENCE_S, until

import mlflash
from mlflash.launch.launcher_variables import launched

RANK = launched(os.environ).rank
note = functools.partial(records.note, rank=RANK)


def state_at(rank: int, step: int, launch: int, times: int, is_lazy: bool) -> dict[str, Any]:
    """The state of a rank after a step that a launch has made.

    Args:
        times: how large it is, as a multiple.
        is_lazy: with a parameter of an optimizer, which may be copied after `save` has returned.
    """
    own, common = np.random.default_rng((rank, step, launch)), np.random.default_rng((step, launch))
    nbytes = times * (1_400_000 if rank == 1 else 120_000 + 1000 * rank)
    state = {
        "own": own.integers(0, 256, nbytes, dtype=np.uint8),
        "common": common.integers(0, 256, times * 100_000, dtype=np.uint8),
        "history": [rank, step, launch, None, b"\x00\xff", float("inf")],
    }
    if is_lazy:
        import torch

        # Whole numbers: a step of the optimizer from any of them to any other is exact.
        state["parameter"] = torch.from_numpy(own.integers(0, 1 << 20, 50_000).astype(np.float32))
    return state


class Training:
    """What the verbs do; see `main`."""

    def __init__(self, launch: int, ckpt: mlflash.Checkpointer, is_lazy: bool):
        self._launch, self._ckpt, self._is_lazy = launch, ckpt, is_lazy
        self._step, self._times = 0, 1
        self._optimizer: Any = None
        self._state = self._at(0, 0)
        if is_lazy:
            import torch

            self._state["parameter"] = torch.nn.Parameter(self._state["parameter"])
            self._optimizer = torch.optim.SGD([self._state["parameter"]], lr=1.0)

    def _at(self, step: int, launch: int) -> dict[str, Any]:
        return state_at(RANK, step, launch, self._times, self._is_lazy)

    def _become(self, state: dict[str, Any]) -> None:
        """Change every leaf in place; a parameter in a step of its optimizer."""
        for name in ("own", "common"):
            self._state[name][:] = state[name]
        self._state["history"] = state["history"]
        if self._is_lazy:
            parameter = self._state["parameter"]
            parameter.grad = parameter.detach() - state["parameter"]
            self._optimizer.step()

    def _spoil(self) -> None:
        """Change every bit of the arrays; a parameter in a step of its optimizer."""
        for name in ("own", "common"):
            self._state[name] ^= 255
        if self._is_lazy:
            parameter = self._state["parameter"]
            parameter.grad = 2 * parameter.detach()
            self._optimizer.step()

    def restore(self) -> None:
        """Restore the newest checkpoint, and note of which step and launch it is, and which leaves are wrong."""
        try:
            step = self._ckpt.restore(self._state)
        except mlflash.errors.Unrestorable as error:
            note("restored", step=-1, launch=-1, wrong=[str(error)])
            return
        self._step = step or 0
        launch = self._state["history"][2]
        expected = self._at(self._step, launch)
        wrong = [name for name in ("own", "common") if not np.array_equal(self._state[name], expected[name])]
        wrong += ["history"] * (self._state["history"] != expected["history"])
        if self._is_lazy:
            wrong += ["parameter"] * (not self._state["parameter"].detach().equal(expected["parameter"]))
        note("restored", step=step, launch=launch, wrong=wrong)

    def save(self) -> None:
        self._wait(self._save())

    def save_two(self) -> None:
        """Save the next two steps, the second as soon as the first is handed over, and wait for both."""
        for snapshot in (self._save(), self._save()):
            self._wait(snapshot)

    def _save(self) -> mlflash.Snapshot:
        self._step += 1
        self._become(self._at(self._step, self._launch))
        snapshot = self._ckpt.save(self._step, self._state, until=self._optimizer)
        self._spoil()  # at once, as the promise says
        return snapshot

    def _wait(self, snapshot: mlflash.Snapshot) -> None:
        snapshot.wait()
        note("committed", step=snapshot.step)

    def grow(self) -> None:
        """Let the state be three times as large from now on."""
        self._times = 3
        self._state = self._at(self._step, self._launch)

    def drain(self) -> None:
        drain = self._ckpt.drain()
        drain.wait(PATIENCE_S)
        note("drained", step=drain.step)

    def damage(self, kind: str, node: int, rank: int) -> None:
        """Flip a byte of a node's own slot, copy or parity of a rank, and wait until its courier has found that."""
        if node != RANK:
            return
        folder = Path(os.environ["MLFLASH_MEMORY"], f"mlflash-{os.getuid()}", os.environ["MLFLASH_JOB"])
        path, header = damage.slot(folder, kind, rank, self._step)
        damage.flip(path, header.extents.payload_start + 5000)
        until(lambda: "is damaged: " in (OUT / "log").read_text(), "the courier to find the damage")


def main(
    launch: int, verbs: Sequence[Sequence[Any]], traps: Sequence[dict[str, Any]], options: dict[str, Any],
    is_lazy: bool = False,
) -> None:  # fmt: skip
    """Restore, do what verbs say, each with its arguments, and close.

    Args:
        launch: its number; part of every state that it saves.
        verbs: names of methods of `Training`.
        traps: see traps.py.
        options: of the Checkpointer.
    """
    note("start")
    set_traps(traps, RANK)
    with mlflash.Checkpointer(replicated={"common": True}, **options) as ckpt:
        training = Training(launch, ckpt, is_lazy)
        training.restore()
        for verb, *given in verbs:
            getattr(training, verb)(*given)
    note("end")


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
