"""Files of DCP's Hugging Face storage and of torch_checkpointing: what is read, what is written, what is refused."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

from mlflash import Checkpointer
from mlflash.adapters.dcp import MemoryReader
from mlflash.cli import main
from mlflash.errors import ConfigError, StructureMismatch
from mlflash.storage.store import DCP, SAFETENSORS, TORCH_CHECKPOINTING, format_of
from mlflash.tools.export_imports import read_dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
QUIET = "ignore:TypedStorage is deprecated:UserWarning"


def model_and_optimizer(trained: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 4, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters())
    if trained:
        model[1](model[0](torch.ones(2, 4)).bfloat16()).sum().backward()
        optimizer.step()
    return model, optimizer


def same(found: Any, wanted: Any) -> bool:
    """Whether nested values are the same, tensors bit by bit."""
    if isinstance(wanted, torch.Tensor):
        return found.dtype == wanted.dtype and torch.equal(found, wanted)
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[key], wanted[key]) for key in wanted)
    return bool(found == wanted)


def tensors(by: float) -> dict[str, Any]:
    return {"model": {"0.weight": torch.arange(12.0).view(3, 4) * by, "0.bias": torch.ones(3).bfloat16() * by},
            "count": torch.tensor(7) * int(by)}  # fmt: skip


NAMES = ["count", "model.0.bias", "model.0.weight"]


def command(*words: object) -> str:
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return str(done.output)


# Hugging Face


@pytest.fixture
def hugging_face(tmp_path: Path) -> Path:
    """A directory that DCP's writer of Hugging Face files has written, in two files."""
    pytest.importorskip("safetensors")
    mapping = {name: 1 + number % 2 for number, name in enumerate(NAMES)}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "hf"), fqn_to_index_mapping=mapping)
    dcp.save(tensors(1), storage_writer=writer, no_dist=True)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == 2
    return tmp_path / "hf"


def test_files_of_hugging_face_are_imported_and_loaded_by_name(hugging_face: Path, tmp_path: Path) -> None:
    found = read_dcp(hugging_face)
    wanted = tensors(1)
    assert same(found, {"count": wanted["count"], **{f"model.{name}": t for name, t in wanted["model"].items()}})
    command("import", hugging_face, "--to", tmp_path / "run", "--step", 5, "--memory", tmp_path)
    with Checkpointer(tmp_path / "run", job="t", memory=str(tmp_path), redundancy="none") as ckpt:
        state = tensors(0)
        dcp.load(state, checkpoint_id="step-5", storage_reader=MemoryReader(ckpt), no_dist=True)
        assert same(state, wanted)
        by_name = {name: torch.zeros_like(tensor) for name, tensor in found.items()}
        assert ckpt.restore(by_name) == 5 and same(by_name, found)


def test_an_export_to_safetensors_is_read_by_the_reader_of_dcp_and_imported(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    with Checkpointer(tmp_path / "run", job="t", memory=str(tmp_path), redundancy="none") as ckpt:
        ckpt.save(3, tensors(2)).wait()
        ckpt.drain().wait()
    out = ["--to", "safetensors", "--shard-size", "20B", "--directory", tmp_path / "run"]
    command("export", 3, tmp_path / "out", *out)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2
    state = tensors(0)
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "out")), no_dist=True)
    assert same(state, tensors(2))
    assert sorted(read_dcp(tmp_path / "out")) == NAMES


def test_files_of_hugging_face_that_are_not_whole_are_refused(hugging_face: Path, tmp_path: Path) -> None:
    first, second = sorted(hugging_face.glob("*.safetensors"))
    index = hugging_face / "model.safetensors.index.json"
    described = json.loads(index.read_text())

    def refused(text: str) -> None:
        with pytest.raises(StructureMismatch, match=text):
            read_dcp(hugging_face)

    index.write_text(json.dumps({**described, "metadata": {"total_size": described["metadata"]["total_size"] + 1}}))
    refused("ranks write over each other's parts")
    index.write_text(json.dumps({**described, "weight_map": {**described["weight_map"], "lost": first.name}}))
    refused(r"no file has this tensor.*at 'lost'")
    index.write_text(json.dumps(described))
    second.rename(tmp_path / "aside")
    refused(r"not those that model\.safetensors\.index\.json names")
    index.unlink()
    shutil.copy(tmp_path / "aside", second)
    refused("or it is missing")
    second.unlink()
    first.rename(hugging_face / "shard-00001-model-00001-of-00001.safetensors")
    refused("enable_consolidation=True")


def test_a_number_that_dcps_writer_of_hugging_face_files_took_is_named(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    dcp.save({**tensors(1), "step": 7}, storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path / "hf")), no_dist=True)
    with pytest.raises(StructureMismatch, match="a value that is no tensor"):
        read_dcp(tmp_path / "hf")


def test_files_of_hugging_face_behind_a_url_are_refused(hugging_face: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    files.put(str(hugging_face), "/other-libraries", recursive=True)
    with pytest.raises(ConfigError, match="copy them there first"):
        read_dcp("memory://other-libraries")


# torch_checkpointing


@pytest.fixture
def library() -> Iterator[Any]:
    """The package torch_checkpointing."""
    yield pytest.importorskip("torch_checkpointing")


def manager(library: Any, asynchronous: bool = False, **items: Any) -> Any:
    """A CheckpointManager for CPUs, on a file system that may not know O_DIRECT."""
    from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
    from torch_checkpointing.staging import CheckpointStagerConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    save = library.SyncCheckpointSaverConfig()
    if asynchronous:
        save = library.AsyncCheckpointSaverConfig(
            staging_config=CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False),
            process_config=CheckpointProcessConfig(subprocess_init_timeout_secs=100),
        )
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    return library.CheckpointManager(library.CheckpointManager.Config(items=items, save=save, storage_config=storage))


@pytest.mark.filterwarnings(QUIET)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_training_goes_on_from_torch_checkpointing_with_both_side_by_side(
    library: Any, asynchronous: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = model_and_optimizer(trained=True)
    other_manager, place = manager(library, asynchronous), tmp_path / "theirs" / "step-00000010"
    options = {"job": "t", "memory": str(tmp_path), "redundancy": "none"}
    with Checkpointer(tmp_path / "other", **options) as ckpt:
        snapshot = ckpt.save(10, {"model": model})
        written = other_manager.save(
            str(place), {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 10}
        )
        assert (written is not None) == asynchronous
        if written is not None:
            written.result(100)
        snapshot.wait()
    assert sorted(path.name for path in place.iterdir()) == ["model_0.pt", "optimizer_0.pt", "step_0.pt"]
    other_manager.close()

    restored, new = model_and_optimizer(trained=False)
    state = {"model": restored, "optimizer": new}
    with Checkpointer(tmp_path / "theirs", **options | {"job": "u"}) as ckpt:
        assert ckpt.restore(state) is None
        (warned,) = [r for r in caplog.records if "nothing is restored, but" in r.getMessage()]
        assert warned.levelno == logging.WARNING and f"{place} has a checkpoint of torch_checkp" in warned.getMessage()
        loader = manager(library)
        loaded = loader.load(
            str(place), into={"model": restored.state_dict(), "optimizer": None, "step": 0}, strict=True
        )
        loader.close()
        new.load_state_dict(loaded["optimizer"])
        ckpt.save(loaded["step"], state).wait()
        ckpt.drain().wait()
    third, last = model_and_optimizer(trained=False)
    with Checkpointer(tmp_path / "theirs", **options | {"job": "v"}) as ckpt:  # memory has another job
        assert ckpt.restore({"model": third, "optimizer": last}) == 10
    assert same(third.state_dict(), model.state_dict()) and same(last.state_dict(), optimizer.state_dict())
    assert sorted(path.name for path in place.iterdir()) == ["model_0.pt", "optimizer_0.pt", "step_0.pt"]


@pytest.mark.filterwarnings(QUIET)
def test_torch_checkpointing_reads_exports_and_names_the_file_that_a_drain_lacks(library: Any, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.hf.metadata import HuggingFaceSafetensorsDistributedMetadataFormat as OfHuggingFace

    model, optimizer = model_and_optimizer(trained=True)
    run = tmp_path / "run"
    with Checkpointer(run, job="t", memory=str(tmp_path), redundancy="none", format="dcp") as ckpt:
        ckpt.save(3, {"model": model, "optimizer": optimizer}).wait()
        ckpt.drain().wait()
    command("export", 3, tmp_path / "torch", "--to", "torch", "--name", "state_0.pt", "--directory", run)
    command("export", 3, tmp_path / "hf", "--to", "safetensors", "--keep", "model.*", "--rename", r"^model\.", "",
            "--directory", run)  # fmt: skip

    restored, _ = model_and_optimizer(trained=False)
    plain = manager(library)
    loaded = plain.load(str(tmp_path / "torch"), into={"state": {"model": restored.state_dict(), "optimizer": None}})
    assert same(restored.state_dict(), model.state_dict())
    assert same(loaded["state"]["optimizer"], optimizer.state_dict())
    with pytest.raises(FileNotFoundError, match=r"step-00000003/model_0\.pt for checkpoint item 'model'"):
        plain.load(str(run / "step-00000003"), into={"model": restored.state_dict()})
    plain.close()

    restored, _ = model_and_optimizer(trained=False)
    by_name = manager(library, model=library.ItemSpec(resharder=DefaultResharder()))
    by_name.load(
        str(tmp_path / "hf"), into={"model": restored.state_dict()}, metadata_format=OfHuggingFace, strict=True
    )
    by_name.close()
    assert same(restored.state_dict(), model.state_dict())


def test_files_of_torch_checkpointing_are_refused_by_name(library: Any, tmp_path: Path) -> None:
    other_manager = manager(library)
    other_manager.save(str(tmp_path / "theirs"), {"model": {"w": torch.ones(3)}})
    other_manager.close()
    with pytest.raises(StructureMismatch, match=r"checkpoint of torch_checkpointing, .*CheckpointManager"):
        read_dcp(tmp_path / "theirs")


@pytest.mark.parametrize(
    ("names", "form"),
    [
        ([".metadata", "__0_0.distcp"], DCP),
        (["model.safetensors"], SAFETENSORS),
        (["metadata.pkl", "model_3.pt"], TORCH_CHECKPOINTING),
        (["model_0.pt", "model_1.pt"], TORCH_CHECKPOINTING),
        ([".metadata", "__0_0.distcp", "checkpoint.mlflash"], ""),
        (["checkpoint.h5"], ""),
        (["epoch_7.pt", "notes"], ""),
    ],
)
def test_the_names_of_files_say_who_has_written_them(names: list[str], form: str) -> None:
    assert format_of(names) == form
