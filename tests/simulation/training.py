"""The program of a simulated trainer: it restores, saves some steps, and closes, as a user's does."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import couriers
import machine
import torch
from scheduler import Process
from states import NO_LAUNCH, Setter

import mlflash

if TYPE_CHECKING:
    from history import History

TIMEOUT_S = 60.0
_CALL_LIMIT_S = 2 * TIMEOUT_S + 40  # a call may wait for the save before, and for an error that comes late
_REST_S = 3.0  # a pause in which couriers have nothing to do but to verify what is at rest


class Training:
    """One trainer of a launch.

    Args:
        history: what is drawn, and what has to hold.
        process: of the trainer.
    """

    def __init__(self, history: History, process: Process):
        self._history, self._process, self._rank = history, process, process.rank
        self._setting, self._launch = history.setting, history.launch
        self._special, self._states, self._oracle = history.setting.special, history.states, history.oracle
        self._optimizer: Setter | None = None
        self._number = self._launch.number  # as the content of states names it
        self._ckpt: mlflash.Checkpointer

    def run(self) -> None:
        """Be the main thread of the trainer, to its end."""
        history, process = self._history, self._process
        try:
            self._train()
        except Exception as error:
            self._note("error", error=error, text="".join(traceback.format_exception(error))[-3000:])
            history.outcomes[type(error).__name__] += 1
            if not isinstance(error, mlflash.errors.Unrestorable):  # which all ranks raise
                self._launch.died = True
                history.end_others(mean=3000)  # as launchers do
                history.kernel.kill(process)
        if process.is_alive:
            couriers.exit_trainer()
            history.kernel.kill(process)
        self._launch.ended.add(self._process)

    def _train(self) -> None:
        self._ckpt = ckpt = self._timed("Checkpointer", self._checkpointer)
        state, start = self._restore()
        first = (start or 0) + 1
        for step in range(first, first + self._launch.saves):
            state = self._advance(state, step)
            self._save(state, step)
            if "repair" in self._special:
                self._rest(step)
            if step in self._launch.marks:
                self._note("marking", step=step)
                self._timed("mark_bad", lambda step=step: ckpt.mark_bad(step))
                self._note("marked", step=step)
            self._compute()
        self._timed("wait", ckpt.wait)
        if "drain" in self._special:
            self._wait_drained()
        steps = self._timed("steps", ckpt.steps)
        self._timed("close", ckpt.close)
        self._note("end", step=steps[-1] if steps else None)

    def _checkpointer(self) -> mlflash.Checkpointer:
        return mlflash.Checkpointer(**self._settings())

    def _settings(self) -> dict[str, Any]:
        setting, more = self._setting, dict[str, Any]()
        if "light" in self._special:
            more |= {"light": 2}
        if "disk" in self._special:
            more |= {"copies": str(self._history.disks), "history": int("whole" in self._special)}
        if "drain" in self._special:
            more |= {"directory": str(self._history.files), "drain_every": 2, "keep_last": 2,
                     "format": setting.format}  # fmt: skip
        if "values" in self._special:
            more |= {"on_suspect": "keep", "check_values": 1.0, "certify_after": 2}
        if setting.meets == "comm":
            more |= {"comm": machine.MPI.COMM_WORLD}
        return dict(
            job="j", memory=str(self._history.memory), redundancy=setting.scheme, transport=setting.transport,
            timeout_s=TIMEOUT_S,
            scrub_rate=20e6 if "repair" in self._special else 0, when_busy=setting.when_busy,
            replicated=True if self._special & {"common", "elastic"} else None, **more,
        )  # fmt: skip

    def _restore(self) -> tuple[dict[str, Any], int | None]:
        oracle, launch = self._oracle, self._launch
        before = oracle.newest[1] if oracle.newest else 0
        launch.phases["restoring"] += 1
        more = {"certified": True} if launch.wants_certified else {}
        state = self._states.at(self._rank, before, NO_LAUNCH)
        if "light" in self._special:
            state["optimizer"] = torch.optim.SGD([state["parameter"]], lr=1.0)
        try:
            start = self._timed("restore", lambda: self._ckpt.restore(state, **more))
        except mlflash.errors.StructureMismatch:  # weights had grown, or not yet
            state = self._states.at(self._rank, 4 if before < 4 else 0, NO_LAUNCH)
            start = self._timed("restore", lambda: self._ckpt.restore(state, **more))
        except mlflash.errors.StepNotFound:  # nothing is certified
            start = self._timed("restore", lambda: self._ckpt.restore(state))
            more = {}
        except mlflash.errors.Unrestorable as error:
            self._note("unrestorable", text=str(error))
            raise
        found = None if start is None else state["launch"]
        is_new = self._rank >= min(oracle.ranks_of_newest, oracle.ranks_of.get(found, self._rank + 1))
        wrong = [] if start is None else self._states.differences(state, self._rank, start, found, is_new)
        self._note("restored certified" if more else "restored", step=start, launch=found, wrong=wrong)
        if "lazy" in self._special:
            self._optimizer = Setter(state["parameter"])
        return state, start

    def _compute(self) -> None:
        """Take some time until the next step, another time on each rank."""
        kernel, step_s = self._history.kernel, self._launch.step_s
        kernel.point("train")
        if step_s:
            kernel.block(kernel.now + kernel.random.expovariate(1 / step_s))

    def _advance(self, state: dict[str, Any], step: int) -> dict[str, Any]:
        new = self._states.at(self._rank, step, self._number)
        if self._optimizer is not None:
            self._optimizer.step(new["parameter"].detach())
            new["parameter"] = state["parameter"]
        elif "light" in self._special:  # a step of 1 that ends at the new content: all are small whole numbers
            parameter = state["parameter"]
            parameter.grad = parameter.detach() - new["parameter"].detach()
            state["optimizer"].step()
            new |= {"parameter": parameter, "optimizer": state["optimizer"]}
        return new

    def _save(self, state: dict[str, Any], step: int) -> None:
        launch = self._launch
        self._note("saving", step=step)
        launch.phases["saving"] += self._rank == launch.plan.who
        snapshot = self._timed("save", lambda: self._ckpt.save(step, state, until=self._optimizer))
        launch.snapshots.append((self._rank, self._number, step, snapshot))
        state["weights"][:] = 7  # at once, as the promise says
        if launch.waits == "all" or (launch.waits == "some" and step % 2):
            try:
                self._timed("Snapshot.wait", snapshot.wait)
                self._note("committed", step=step)
            except mlflash.errors.MlflashError as error:
                self._note("failed", step=step, text=f"{type(error).__name__}: {error}")

    def _rest(self, step: int) -> None:
        """Do nothing for some time; in the middle of it, a bit of what is at rest changes."""
        self._timed("wait", self._ckpt.wait)
        self._history.kernel.sleep(_REST_S / 2)
        if self._rank == self._launch.plan.who:
            self._history.flip_at_rest()
        self._history.kernel.sleep(_REST_S)

    def _wait_drained(self) -> None:
        try:
            drain = self._timed("drain", self._ckpt.drain)
            self._timed("Drain.wait", drain.wait)
            self._note("drained", step=drain.step)
        except mlflash.errors.MlflashError as error:
            self._note("drain failed", text=f"{type(error).__name__}: {error}")

    def _note(self, event: str, **more: Any) -> None:
        self._history.note(self._process, event, **more)

    def _timed(self, name: str, call: Callable[[], Any]) -> Any:
        """Call something that must end before its deadline, in virtual time."""
        kernel, process = self._history.kernel, self._process
        start, stopped = kernel.now, process.stopped_until
        try:
            return call()
        finally:
            took = kernel.now - start
            if took > _CALL_LIMIT_S and process.is_alive and process.stopped_until == stopped:
                text = f"launch {self._launch.number}: {name} of rank {self._rank} took {took:.1f} s"
                self._history.problems.append(text)
