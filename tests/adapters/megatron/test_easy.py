"""A real Megatron Core trains with EasyCkpt's three calls, loses a node, and goes on; also on fewer ranks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import COMM, Nodes
from megatron_on_cpu import Training, digest, on_cpu, virtual_pipeline
from torch_jobs import job

from mlflash.errors import ConfigError, StructureMismatch


class Scheduler:
    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"num_steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["num_steps"]


@pytest.fixture
def easy() -> Any:
    from mlflash.adapters.megatron import easy

    yield easy
    if easy._running is not None:  # the test has failed
        easy._running.checkpointer.__exit__(RuntimeError, None, None)
        easy._running = None


@pytest.fixture
def arguments(of_megatron: Any, root: Path) -> argparse.Namespace:
    of_megatron.arguments.load = str(root / "load")
    return of_megatron.arguments


def train(easy: Any, training: Training, scheduler: Scheduler, last: int, arguments: Any = None) -> None:
    while training.step < last:
        training.train(training.step + 1)
        scheduler.steps += 8
        if arguments is not None:
            arguments.consumed_train_samples += 8
        easy.save_checkpoint_if_needed(training.step, training.model, training.optimizer, scheduler)


@pytest.mark.parametrize("how", [(1, False), (2, True), (1, True, True)], ids=["plain", "tensor", "overlaps"])
def test_training_goes_on_after_a_lost_node_as_if_nothing_had_happened(
    easy: Any, arguments: argparse.Namespace, options: dict[str, Any], root: Path, nodes: Nodes,
    how: Any,
) -> None:  # fmt: skip
    with job(), on_cpu():
        whole = Training(*how)
        whole.train(9)
        expected = whole.losses[6:], digest(whole)
        first, scheduler = Training(*how), Scheduler()
        easy.initialize(2, 4, 1, root / "log", **options)
        assert easy.load_checkpoint([first.model], first.optimizer, scheduler) == 0
        train(easy, first, scheduler, 7, arguments)
        easy.close()
    assert sorted(path.name for path in Path(arguments.save).glob("step-*")) == ["step-00000006"], (
        "the newest, at the end"
    )
    log = (root / "log").read_text()
    assert "step 4 was drained" in log and "deleted" in log and "WARNING" not in log
    nodes.lose(1)
    arguments.consumed_train_samples = 0
    with job(), on_cpu():
        again, scheduler = Training(*how), Scheduler()
        easy.initialize(2, 4, 1, **options)
        again.step = easy.load_checkpoint(again.model, again.optimizer, scheduler)
        assert (again.step, scheduler.steps, arguments.consumed_train_samples) == (6, 48, 48)
        train(easy, again, scheduler, 9)
        assert (again.losses, digest(again)) == expected
        easy.close()


def test_as_on_easyckpts_page_it_is_initialized_after_the_load_with_any_intervals(
    easy: Any, arguments: argparse.Namespace, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And `load_checkpoint` is called as Megatron calls its own."""
    for name, value in (("MLFLASH_JOB", options["job"]), ("MLFLASH_MEMORY", options["memory"])):
        monkeypatch.setenv(name, value)
    arguments.num_floating_point_operations_so_far = 7
    given = {name: value for name, value in options.items() if name not in ("job", "memory")}
    with job(), on_cpu():
        first, scheduler = Training(), Scheduler()
        found = easy.load_checkpoint([first.model], first.optimizer, scheduler, checkpointing_context={},
                                     skip_load_to_model_and_opt=False)  # fmt: skip
        assert found == (0, 7)
        with pytest.raises(TypeError, match="load_agr"):
            easy.load_checkpoint(first.model, first.optimizer, scheduler, load_agr="load")
        with pytest.raises(ConfigError, match="initialize"):
            easy.save_checkpoint_if_needed(1, first.model, first.optimizer, scheduler)
        with pytest.raises(ConfigError, match=r"call initialize first(.|\n)*job='other'"):
            easy.initialize_easyckpt(2, 5, 5, job="other")
        easy.initialize_easyckpt(save_mem_interval=2, save_storage_interval=5, max_ckpt_num=5, **given)
        train(easy, first, scheduler, 6)
        weights = digest(first)
        train(easy, first, scheduler, 7)
        easy.close()
        if COMM.rank == 0:
            assert min(path.name for path in Path(arguments.save).glob("step-*")) == "step-00000005"
        again, scheduler = Training(), Scheduler()
        with monkeypatch.context() as patched:
            patched.setattr(again.model.module, "load_state_dict", None)  # which is not called
            found = easy.load_checkpoint(again.model, again.optimizer, scheduler, skip_load_to_model_and_opt=True)
        assert found == 6 and scheduler.steps == 48
        assert easy.load_checkpoint(again.model, again.optimizer, scheduler) == 6
        assert digest(again) == weights and scheduler.steps == 48
        easy.close()


@pytest.mark.parametrize("how", [(1, False), (1, True), (1, True, True)], ids=["plain", "sharded", "overlaps"])
def test_what_is_copied_until_the_next_step_is_what_it_was_at_the_save(
    easy: Any, options: dict[str, Any], came: list[None], how: Any
) -> None:
    with job(), on_cpu():
        first, scheduler = Training(*how), Scheduler()
        easy.initialize(1, 0, 0, directory=None, **options)
        train(easy, first, scheduler, 6)
        weights = digest(first)
        first.train(7)  # as early as it may
        easy.close()
        again = Training(*how)
        easy.initialize(1, 0, 0, directory=None, **options)
        assert easy.load_checkpoint(again.model, again.optimizer, scheduler) == 6
        assert digest(again) == weights
        again.step = 6
        again.train(7)
        assert (again.losses[-1], digest(again)) == (first.losses[-1], digest(first))
        easy.close()
    assert COMM.allreduce(len(came)) >= 3, "steps did not have to wait"


def test_fewer_data_parallel_ranks_load_with_concat_only(
    easy: Any, options: dict[str, Any], nodes: Nodes, root: Path
) -> None:
    with job(), on_cpu():
        first, scheduler = Training(), Scheduler()
        easy.initialize(1, 0, 0, directory=None, **options)
        train(easy, first, scheduler, 3)
        weights = digest(first)
        easy.close()
        first.train(4)
        expected = first.losses[-1]
    nodes.lose(1)
    with job(2) as comm:
        if comm is not None:
            with on_cpu():
                again = Training()
                easy.initialize(1, 0, 0, directory=None, comm=comm, **options)
                with pytest.raises(StructureMismatch, match="concat=True"):
                    easy.load_checkpoint(again.model, again.optimizer, scheduler)
                assert easy.load_checkpoint(again.model, again.optimizer, scheduler, concat=True) == 3
                assert digest(again) == weights
                again.step = 3
                train(easy, again, scheduler, 4)
                # Half of the batches: other sums, but the same optimizer's state.
                assert again.losses[-1][1] == pytest.approx(expected[1], rel=0.5)
                easy.close()
    with job(2) as comm:
        if comm is not None:
            with on_cpu():
                other = Training(tensor=2)
                easy.initialize(1, 0, 0, directory=None, comm=comm, **options)
                with pytest.raises(StructureMismatch, match="no other layout of: tensor parallel"):
                    easy.load_checkpoint(other.model, other.optimizer, scheduler, concat=True)
                easy.close()


def test_another_layout_of_experts_is_refused_by_name(easy: Any, options: dict[str, Any]) -> None:
    """On the same ranks, with the same tensor and pipeline parallelism: the state of experts would be scrambled."""
    with job(), on_cpu():
        first, scheduler = Training(experts=2), Scheduler()
        easy.initialize(1, 0, 0, directory=None, **options)
        train(easy, first, scheduler, 1)
        easy.close()
        for experts, expert_tensor, concat in ((1, 1, False), (1, 1, True), (1, 2, True)):
            other = Training(experts=experts, expert_tensor=expert_tensor)
            easy.initialize(1, 0, 0, directory=None, **options)
            with pytest.raises(StructureMismatch, match="expert parallel" if concat else "concat=True"):
                easy.load_checkpoint(other.model, other.optimizer, scheduler, concat=concat)
            easy.close()


def test_chunks_of_a_virtual_pipeline_come_back(easy: Any, options: dict[str, Any]) -> None:
    with job(), on_cpu():
        chunks, optimizer = virtual_pipeline()
        easy.initialize(1, 0, 0, directory=None, **options)
        for number, chunk in enumerate(chunks):
            for parameter in chunk.parameters():
                parameter.data.normal_(generator=torch.Generator().manual_seed(number))
            chunk.zero_grad_buffer()
            chunk.finish_grad_sync()
        optimizer.step()
        easy.save_checkpoint_if_needed(1, chunks, optimizer, Scheduler())
        easy.close()
        expected = [parameter.detach().clone() for chunk in chunks for parameter in chunk.parameters()]
        chunks, optimizer = virtual_pipeline()
        easy.initialize(1, 0, 0, directory=None, **options)
        assert easy.load_checkpoint(chunks, optimizer, Scheduler()) == 1
        found = [parameter for chunk in chunks for parameter in chunk.parameters()]
        assert all(map(torch.equal, found, expected))
        easy.close()


@pytest.mark.parametrize(("theirs", "loaded"), [(2, 3), (3, 3), (4, 40)])
def test_a_newer_checkpoint_of_megatrons_own_is_loaded_by_megatron(
    easy: Any, of_megatron: Any, options: dict[str, Any], theirs: int, loaded: int
) -> None:
    """As where mlflash was off meanwhile, and Megatron saved by itself."""
    of_megatron.checkpointing.load_checkpoint = lambda model, optimizer, scheduler, which, strict: (10 * theirs, which)
    with job(), on_cpu():
        first = Training()
        easy.initialize(1, 0, 0, **options)
        train(easy, first, Scheduler(), 3)
        of_megatron.has_saved(theirs)
        assert easy.load_checkpoint(first.model, first.optimizer, Scheduler()) == loaded
        easy.close()


def test_intervals_that_make_no_sense_are_refused(easy: Any) -> None:
    with job():
        for mem, storage in ((0, 10), (2, -2)):
            with pytest.raises(ConfigError, match="intervals"):
                easy.initialize(mem, storage, 1)
        with pytest.raises(ConfigError, match="initialize"):
            easy.save_checkpoint_if_needed(1, None, None, None)


def test_where_mlflash_is_off_the_calls_leave_saving_and_loading_to_megatron(
    easy: Any, options: dict[str, Any], root: Path, of_megatron: Any, enabled: bool
) -> None:
    arguments, calls = of_megatron.arguments, list[tuple[Any, ...]]()
    arguments.num_floating_point_operations_so_far = 50

    def save(iteration: int, *more: Any) -> None:
        calls.append((iteration, *more))
        of_megatron.has_saved(iteration)

    of_megatron.checkpointing.save_checkpoint = save
    of_megatron.checkpointing.load_checkpoint = lambda model, optimizer, scheduler, which, strict: (
        int(Path(getattr(arguments, which), "latest_checkpointed_iteration.txt").read_text()), 0)  # fmt: skip
    with job():
        easy.initialize(2, 4, 1, enabled=enabled, **options)
        assert easy.load_checkpoint("model", "optimizer", None) == 0
        for iteration in range(1, 11):
            easy.save_checkpoint_if_needed(iteration, "model", "optimizer", None)
        easy.close()
        assert calls == [(4, ["model"], "optimizer", None, 50), (8, ["model"], "optimizer", None, 50)]
        easy.initialize(2, 0, 1, enabled=enabled, **options)
        assert easy.load_checkpoint("model", "optimizer", None) == 8, "what Megatron has saved to --save is found"
        easy.save_checkpoint_if_needed(12, "model", "optimizer", None)  # nothing goes to the directory
        arguments.load = str(root / "load")
        of_megatron.has_saved(8, arguments.load)
        assert easy.load_checkpoint("model", "optimizer", None) == 8
        easy.close()
    assert len(calls) == 2 and not list(root.glob("node*/*"))
