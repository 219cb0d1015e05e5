"""Rank program of test_deepspeed.py: what is special to DeepSpeed, several cases in one launch."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from deepspeed_job import VARIANTS, deepspeed, step
from deepspeed_job import engine_of as engine_with
from job import _tensors
from records import OUT, note

from mlflash import Checkpointer
from mlflash.adapters.deepspeed import EngineState, alike, attach
from mlflash.adapters.distributed import init_process_group
from mlflash.errors import Closed, ConfigError, StructureMismatch, WorldSizeChanged

DISK = OUT.parent / "disk"


def engine_of(stage: str) -> Any:
    return engine_with(**VARIANTS[stage])


def digest(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(
        b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)
    ).hexdigest()


def weights(engine: Any) -> str:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return digest(_tensors(list(engine.module.parameters())))


def whole(engine: Any) -> str:
    return digest([*_tensors(engine.optimizer.state_dict()), torch.get_rng_state()]) + weights(engine)


def rank() -> int:
    return torch.distributed.get_rank()


def raised(kind: type[BaseException], work: Callable[[], Any]) -> str:
    try:
        work()
    except kind as error:
        return str(error)
    return "nothing was raised"


def tags(stage: str) -> None:
    found: dict[str | None, str] = {}
    engine = engine_of(stage)
    with attach(engine, job="tags") as flash:
        for number, tag in enumerate(("first", "second")):
            step(engine, number)
            flash.save({"rank": rank(), "args": argparse.Namespace(lr=0.1)}, tag)
            found[tag] = whole(engine)
        note("listed", steps=flash.steps())
    found[None] = found["second"]
    for tag, expected in found.items():
        engine = engine_of(stage)
        with attach(engine, job="tags"):
            path, client_state = engine.load_checkpoint(DISK / "none", tag)
            note("loaded", tag=tag, path=path, step=engine.global_steps, same=whole(engine) == expected,
                 rank_said=client_state["rank"], args=str(client_state["args"]))  # fmt: skip
    with attach(engine, job="tags"):
        note("unknown", text=raised(AssertionError, lambda: engine.load_checkpoint(DISK / "none", "third")))
    note("nothing written", there=(DISK / "none").exists() or Path("zero_to_fp32.py").exists())


def weights_only(stage: str) -> None:
    """Loaded without optimizer state from memory, it is what DeepSpeed loads from disk."""
    engine = engine_of(stage)
    with attach(engine, job="weights", storage_every=1):
        for number in range(4):
            step(engine, number)
        engine.save_checkpoint(DISK / f"weights-{stage}")
    ways: list[dict[str, bool]] = [{"load_optimizer_states": False}, {"load_lr_scheduler_states": False}]
    if stage != "zero3":
        ways.append({"load_module_only": True})
    for options in ways:
        for where in ("disk", "memory"):
            engine = engine_of(stage)
            if where == "disk":
                engine.load_checkpoint(DISK / f"weights-{stage}", **options)
            else:
                with attach(engine, job="weights") as flash:
                    path, _ = flash.load(**options)
                    assert path == "step 4 of mlflash", path
            at, loaded = (engine.global_steps, engine.get_lr()), weights(engine)
            torch.manual_seed(7)
            losses = [step(engine, number) for number in range(4, 7)]
            note("weights", way=str(options), where=where, of=[at, loaded, losses, whole(engine)])
    engine = engine_of(stage)
    with attach(engine, job="weights") as flash:
        note("module only", stage=stage, text=raised(ConfigError, lambda: flash.load(load_module_only=True)))


def storage(stage: str) -> None:
    """Every second checkpoint goes to storage, also over a relaunch; DeepSpeed alone reads it."""
    directory, found, numbers = DISK / f"storage-{stage}", {}, torch.get_rng_state()
    engine = engine_of(stage)
    with attach(engine, job="storage", storage_every=2) as flash:
        for number in range(5):
            step(engine, number)
            engine.save_checkpoint(directory, client_state={"seen": number + 1})
            found[engine.global_steps] = weights(engine)
            numbers = torch.get_rng_state() if number == 3 else numbers
        in_memory = flash.steps()
    plain = engine_of(stage)
    _, client_state = plain.load_checkpoint(directory)
    note("plain", step=plain.global_steps, same=weights(plain) == found[4], seen=client_state["seen"])
    torch.set_rng_state(numbers)  # DeepSpeed keeps none
    step(plain, 4)
    note("plain", step=plain.global_steps, same=weights(plain) == found[5], seen=client_state["seen"] + 1)
    engine = engine_of(stage)
    with attach(engine, job="storage", storage_every=2) as flash:
        _, client_state = engine.load_checkpoint(directory)
        at = engine.global_steps
        same = weights(engine) == found[5]
        step(engine, 5)
        engine.save_checkpoint(directory, tag="of 6", client_state={"seen": 6})
        flash.storage_every = None
        step(engine, 6)
        engine.save_checkpoint(directory)
        engine.save_checkpoint(directory, tag="again")
        torch.distributed.barrier()
        note("storage", memory=in_memory, disk=sorted(path.name for path in directory.iterdir() if path.is_dir()),
             at=at, same=same, seen=client_state["seen"], later=flash.steps())  # fmt: skip


def in_background(stage: str) -> None:
    """What comes to storage behind training is what DeepSpeed writes there, and DeepSpeed alone goes on from it."""
    ours, theirs = DISK / f"background-{stage}", DISK / f"stock-{stage}"
    engine = engine_of(stage)
    with attach(engine, job="background", every_n_steps=100, in_background=True):
        for number in range(2):
            step(engine, number)
            type(engine).save_checkpoint(engine, theirs, client_state={"seen": number + 1})
            assert engine.save_checkpoint(ours, client_state={"seen": number + 1})
        expected = weights(engine)
    torch.distributed.barrier()  # rank 0 has written `latest`
    files = sorted(path.relative_to(theirs) for path in theirs.rglob("*") if path.is_file())
    same = [(ours / path).read_bytes() == (theirs / path).read_bytes() for path in files]
    extra = {path.relative_to(ours) for path in ours.rglob("*") if path.is_file()} - {*files}
    plain = engine_of(stage)
    _, client_state = plain.load_checkpoint(ours)
    note("background", files=len(same), same=all(same), extra=sorted(map(str, extra)),
         loaded=weights(plain) == expected, seen=client_state["seen"])  # fmt: skip


def failed(stage: str) -> None:
    """DeepSpeed raises on one rank while it gives its state; the next step is saved."""
    engine = engine_of(stage)
    schedule = type(engine.lr_scheduler)
    taken = schedule.state_dict

    def trap(self: Any) -> Any:
        return 1 / 0 if rank() == 1 and engine.global_steps == 2 else taken(self)

    with mock.patch.object(schedule, "state_dict", trap), attach(engine, job="failed", every_n_steps=1) as flash:
        for number in range(3):
            step(engine, number)
            note("failed", text=raised(ZeroDivisionError, flash.save_if_needed))
        note("after it", steps=flash.steps())


def closed(stage: str) -> None:
    engine = engine_of(stage)
    flash = attach(engine, job="closed", storage_every=0)
    step(engine, 0)
    engine.save_checkpoint(DISK / "closed")
    flash.close()
    flash.close()
    before = (DISK / "closed").exists()
    torch.distributed.barrier()
    engine.save_checkpoint(DISK / "closed")
    nothing = engine_of(stage).load_checkpoint(DISK / "none")
    replaced = {"save_checkpoint", "load_checkpoint", "_copy_recovery_script"}
    note("closed", written=[before, (DISK / "closed" / "latest").exists()], nothing=nothing,
         left=sorted(replaced & vars(engine).keys()),
         engine=type(engine.checkpoint_engine).__name__, text=raised(Closed, flash.save),
         leftovers=[path.name for path in OUT.glob("mlflash-deepspeed-*")])  # fmt: skip


def refused(stage: str) -> None:
    """What no rank has for itself cannot be saved by each for itself."""
    from deepspeed.moe.layer import MoE
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadParamConfig

    def start(model: torch.nn.Module) -> Any:
        config = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True}
        return deepspeed.initialize(model=model, optimizer=torch.optim.Adam(model.parameters()), config=config)[0]

    texts = [raised(ConfigError, lambda: attach(engine_of(stage), 0, job="refused"))]
    texts.append(raised(ConfigError, lambda: attach(start(PipelineModule([torch.nn.Linear(4, 4)], 1)), job="refused")))
    texts.append(raised(ConfigError, lambda: attach(start(MoE(4, torch.nn.Linear(4, 4), 2)), job="refused")))
    engine = engine_of(stage)
    for one, name, value in (
        (engine.optimizer, "swap_optimizer", True),
        (engine._config.zero_config, "offload_param", DeepSpeedZeroOffloadParamConfig(device="nvme")),
        (engine._config.zero_config, "elastic_checkpoint", True),
    ):
        with mock.patch.object(one, name, value, create=True):
            texts.append(raised(ConfigError, lambda: attach(engine, job="refused")))
    note("refused", texts=texts)


def tensor_parallel(stage: str) -> None:
    """Ranks that hold parts of tensors, as DeepSpeed's AutoTP makes them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def start() -> Any:
        torch.manual_seed(1)
        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4))
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1},
                  "tensor_parallel": {"autotp_size": 2}, "zero_allow_untested_optimizer": True}  # fmt: skip
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def train(engine: Any, numbers: range) -> list[float]:
        found = []
        for number in numbers:
            words = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(number))
            loss = engine(input_ids=words, labels=words).loss
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        return found

    engine = start()
    with attach(engine, job="parallel") as flash:
        train(engine, range(2))
        flash.save()
        expected = train(engine, range(2, 4))
    engine = start()
    with attach(engine, job="parallel"):
        engine.load_checkpoint(DISK / "none")
        note("parallel", of=engine.mp_world_size, step=engine.global_steps, same=train(engine, range(2, 4)) == expected)


def shared(flash: Any) -> list[str]:
    layout = flash.checkpointer._saves.stage._layout
    return [entry.name for entry in layout.entries if layout.is_shared(entry)]


def save_shared(stage: str) -> None:
    engine = engine_of(stage)
    with attach(engine, job=f"shared-{stage}") as flash:
        for number in range(2):
            step(engine, number)
            flash.save()
        flash.checkpointer.wait()
        note("saved", stage=stage, whole=whole(engine), shared=shared(flash))
    with attach(engine, job="not-shared", replicated=None) as flash:
        flash.save()
        flash.checkpointer.wait()
        note("not shared", shared=shared(flash))


def load_shared(stage: str) -> None:
    engine = engine_of(stage)
    with attach(engine, job=f"shared-{stage}"):
        engine.load_checkpoint(DISK / "none")
        note("loaded", step=engine.global_steps, whole=whole(engine))


def other_ranks(stage: str) -> None:
    """Another number of ranks is refused, unless what is on disk is newer."""
    engine = engine_of(stage)
    with attach(engine, job=f"shared-{stage}"):
        note("other ranks", text=raised(WorldSizeChanged, lambda: engine.load_checkpoint(DISK / "none")))
        note(
            "other ranks", text=raised(WorldSizeChanged, lambda: engine.load_checkpoint(DISK / "none", "global_step2"))
        )
        for _ in range(3):
            step(engine, 0)
        engine.save_checkpoint(DISK / "of one")
    engine = engine_of(stage)
    with attach(engine, job=f"shared-{stage}"):
        engine.load_checkpoint(DISK / "of one")
        note("from disk", step=engine.global_steps)


def other_stage(stage: str) -> None:
    engine = engine_of(stage)
    with attach(engine, job="stage") as flash:
        step(engine, 0)
        flash.save()
    for other in ("zero0", "zero3", "bf16"):
        engine = engine_of(other)
        with attach(engine, job="stage"):
            note("other stage", text=raised(StructureMismatch, lambda: engine.load_checkpoint(DISK / "none")))  # noqa: B023
    with Checkpointer(job="another") as checkpointer:
        checkpointer.save(1, {"engine": 1})
    with attach(engine, job="another"):
        note("other stage", text=raised(StructureMismatch, lambda: engine.load_checkpoint(DISK / "none")))


def in_a_state(stage: str) -> None:
    engine = engine_of(stage)
    with Checkpointer(job="state", replicated=alike(engine, "its.engine") or None) as checkpointer:
        step(engine, 0)
        checkpointer.save(1, {"its": {"engine": EngineState(engine, client_state={"seen": rank()}), "more": 7}})
        expected, numbers = whole(engine), torch.get_rng_state()
        checkpointer.wait()
        layout = checkpointer._saves.stage._layout
        shares = any(map(layout.is_shared, layout.entries))
    for restored in (False, True):
        mine = EngineState(engine := engine_of(stage))
        with Checkpointer(job="state") as checkpointer:
            if restored:
                checkpointer.restore({"its": {"engine": mine, "more": 0}})
                client_state = mine.client_state
            else:
                client_state = mine.load(checkpointer.load()[1]["its"]["engine"])
        torch.set_rng_state(numbers)
        note("in a state", same=whole(engine) == expected, seen=client_state["seen"] == rank(), shares=shares)


if __name__ == "__main__":
    init_process_group(host="127.0.0.1")
    note("start")
    for stage, case in json.loads(sys.argv[1]):
        globals()[case](stage)
        note("done", case=case)
