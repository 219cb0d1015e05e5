"""Rank program of the tests of frameworks: trainings of one framework, one after the other, as the test says.

A training notes the loss of each step and, at its end, a digest of its weights and its optimizer's state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import json
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import late
import slow_commits
import torch
from damage import damage
from records import OUT, note
from traps import set_traps

from mlflash import crash_points
from mlflash.adapters.distributed import init_process_group
from mlflash.errors import StateError
from mlflash.launch.launcher_variables import launched


@dataclasses.dataclass
class Run:
    """One training."""

    name: str  # of what it notes
    last: int  # step after which it ends
    job: str = ""  # ties it to the trainings before it: to their memory, and to what they wrote to disk
    every: int = 2  # a checkpoint in memory every so many steps,
    skip: int | None = None  # but not every so many; None: no such
    disk: int = 0  # the framework writes a checkpoint of its own to disk every so many steps; 0: never
    kept: int = 0  # so many of those stay there; 0: all
    enabled: bool = True  # whether mlflash is, by the argument of the adapter
    switched_off: bool = False  # whether the environment turns it off, whatever the argument says
    variant: str = ""  # of the framework: how it is parallel
    refused: int = 0  # the save of this step fails on rank 1
    wiped: bool = False  # its memory is deleted before it starts
    damaged: int = 0  # this step is damaged in its memory before it starts, in slots and copies; 0: none
    spoilt: str = ""  # a method that raises on rank 1 in this training, by its full name; what becomes of it is noted
    torn: str = ""  # files that the framework has written are cut before it starts, by this pattern,
    torn_to: float = 0.5  # to so much
    late: bool = False  # what a save leaves to be copied is copied as late as may be: by the step that changes it
    traps: list[dict[str, object]] = dataclasses.field(default_factory=list)  # into which ranks step in it, see `traps`
    trigger: str = ""  # of the framework's own saves to disk; "": see `disk`. What mlflash says is noted then
    follows: bool = False  # whether the adapter is told no interval, and so saves when the framework does
    dies_at: int = 0  # all ranks are killed in this step, once what memory was given is committed; 0: none
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the Checkpointer
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the framework's own checkpoints
    losses: int = 0  # noted so far
    checkpointer: Callable[[], Any] = lambda: None  # the open one, where the run dies

    @property
    def interval(self) -> int | None:
        return None if self.follows else self.every

    @property
    def workers(self) -> int | None:
        """The number of a loader's workers: the training then ends after three epochs, and not at a step."""
        return int(self.variant.removeprefix("workers ")) if self.variant.startswith("workers ") else None

    @property
    def directory(self) -> Path:
        return OUT.parent / f"disk-{self.job or os.environ['MLFLASH_JOB']}"

    @property
    def memories(self) -> list[Path]:
        """Where its slots are on each node."""
        return sorted(Path(os.environ["MLFLASH_MEMORY"]).parent.glob(f"node*/mlflash-{os.getuid()}/{self.job}"))

    @property
    def checkpointing(self) -> dict[str, Any]:
        return {**({"job": self.job} if self.job else {}), **self.settings}

    def loss(self, step: int, loss: float) -> None:
        note("loss", run=self.name, step=step, loss=loss)
        self.losses += 1
        if self.losses == 2:
            slow_commits.let_go(torch.distributed.get_rank())
        if step == self.dies_at:
            checkpointer = self.checkpointer()
            checkpointer.wait()
            there = sorted(path.name for path in self.directory.rglob("[!.]*") if "/." not in str(path))
            note("held", run=self.name, steps=checkpointer.steps(), there=there)
            torch.distributed.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Note what mlflash says, where the framework's own saves are looked at, or what is copied late."""
        log, handler = logging.getLogger("mlflash"), logging.Handler()
        handler.emit = lambda record: note("said", run=self.name, text=record.getMessage())  # type: ignore[method-assign]
        if not self.trigger and not self.late:
            yield
            return
        level = log.level
        log.setLevel(logging.INFO)
        log.addHandler(handler)
        yield
        log.removeHandler(handler)
        log.setLevel(level)

    def commit_slowly(self, behind: bool) -> None:
        """Let commits take time from now on, and note them.

        Args:
            behind: the first takes until the second step was made: training that waited for it would wait for ever.
        """
        slow_commits.begin(torch.distributed.get_rank(), self.name, holds_first=behind)

    def copy_late(self) -> None:
        """Let what saves have left to be copied wait from its first piece on, and note where training waits for it."""
        late.copy_late(lambda: note("late", run=self.name))

    def end(self, model: torch.nn.Module, optimizers: Iterable[Any], more: Any = ()) -> None:
        """Note what has become of the weights, of the optimizers' state, and of more. Collective."""
        digest = hashlib.sha256()
        for tensor in _tensors([model.state_dict(), [one.state_dict() for one in optimizers], more]):
            digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        note("end", run=self.name, digest=digest.hexdigest())


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [(value.full_tensor() if hasattr(value, "full_tensor") else value).detach().reshape(-1)]
    subs = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for sub in subs for tensor in _tensors(sub)]


def _refuse(rank: int, count: int) -> None:
    """Let a rank fail at the so manieth save from now on; also where it would copy before the step is known."""
    seen = {"stage.begun": 0, "stage.copied": 0}

    def reached(point: str) -> None:
        if point not in seen:
            return
        seen[point] += 1
        if seen[point] == count:
            if point == "stage.begun":
                crash_points.arm(None)
            raise StateError("a trap")

    crash_points.arm(reached if torch.distributed.get_rank() == rank else None)


def _tear(run: Run) -> None:
    """Cut what the framework has written, as if it had been killed meanwhile."""
    files = [path for path in run.directory.rglob(run.torn) if path.is_file()]
    assert files, "nothing of this name is there"
    for path in files:
        os.truncate(path, int(path.stat().st_size * run.torn_to))


def _spoil(train: Callable[[Run], None], run: Run, rank: int) -> None:
    """Train with a method that raises on rank 1; note what is raised."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("spoilt on purpose")

    try:
        with mock.patch(run.spoilt, fail) if rank == 1 else contextlib.nullcontext():
            train(run)
    except Exception as error:
        note("refused", run=run.name, error=f"{type(error).__name__}: {error}")


def main(framework: str, runs: list[dict[str, Any]]) -> None:
    slow_commits.reach_into_courier(launched(os.environ).rank)
    init_process_group(host="127.0.0.1")
    rank = torch.distributed.get_rank()
    note("start")
    train = importlib.import_module(f"{framework}_job").train
    for spec in runs:
        run = Run(**spec)
        if run.wiped and rank == 0:
            for memory in run.memories:
                shutil.rmtree(memory)
        if run.damaged and rank == 0:
            assert sum(damage(memory, run.damaged) for memory in run.memories), "nothing of this step is there"
        if run.torn and rank == 0:
            _tear(run)
        torch.distributed.barrier()
        if run.refused:
            _refuse(1, run.refused // run.every)
        if run.late:
            run.copy_late()
        if run.traps:
            set_traps(run.traps, rank)
        before = {*threading.enumerate()}
        with mock.patch.dict(os.environ, {"MLFLASH_DISABLE": "1"} if run.switched_off else {}), run.listening():
            if run.spoilt:
                _spoil(train, run, rank)
            else:
                train(run)
        new = [one.name for one in threading.enumerate() if one not in before and "mlflash" in one.name]
        note("threads", run=run.name, names=new)
        crash_points.arm(None)
        slow_commits.end(rank)
        note("done", run=run.name)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
