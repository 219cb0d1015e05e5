"""What is exported opens with the stock libraries, in a process where mlflash cannot be imported."""

from __future__ import annotations

import json
import math
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from files.plain_dcp import save_sharded
from torch.distributed.checkpoint import FileSystemWriter, save

from mlflash import Checkpointer
from mlflash.cli import main
from mlflash.errors import ConfigError, StateError, StructureMismatch
from mlflash.state.leaves import from_bytes
from mlflash.state.plain_values import decode_plain
from mlflash.storage.store import open_store
from mlflash.storage.whole_state import build
from mlflash.tools.export import Selection, whole_of
from mlflash.tools.export_formats import DTYPES, write_dcp, write_safetensors, write_torch
from mlflash.tools.export_imports import read_dcp

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


PRELUDE = """
import sys, warnings
sys.modules["mlflash"] = None  # importing it fails
warnings.filterwarnings("ignore", "ComplexHalf support|torch.distributed is disabled")
import torch
def same(a, b, at="state"):
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), at
        assert torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))), at
    elif isinstance(a, dict):
        assert isinstance(b, dict) and a.keys() == b.keys(), (at, list(a), list(b))
        for key in a:
            same(a[key], b[key], f"{at}.{key}")
    elif isinstance(a, (list, tuple)):
        assert type(a) is type(b) and len(a) == len(b), at
        for i, (x, y) in enumerate(zip(a, b)):
            same(x, y, f"{at}.{i}")
    elif type(a).__module__ == "numpy":
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), at
    else:
        assert type(a) is type(b) and a == b, (at, a, b)
"""


def without_mlflash(directory: Path, *lines: str) -> None:
    """Run Python lines in a directory, in a process that has only the stock libraries."""
    program = PRELUDE + textwrap.dedent("\n".join(lines))
    result = subprocess.run([sys.executable, "-W", "error", "-c", program], cwd=directory, timeout=100,
                            capture_output=True, text=True, check=False)  # fmt: skip
    assert result.returncode == 0, result.stderr


def some(dtype: str, *shape: int) -> torch.Tensor:
    kind = getattr(torch, dtype)
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (math.prod(shape) * kind.itemsize,), dtype=torch.uint8)
    return raw.view(kind).view(shape)


DCP_DTYPES = [*DTYPES, "complex32", "complex128", "float4_e2m1fn_x2"]
TORCH_DTYPES = [*DCP_DTYPES, "bits8", "bits16"]


def of_every_dtype(dtypes: Sequence[str]) -> dict[str, torch.Tensor]:
    shapes = {"0-dim": (), "empty": (0, 4), "matrix": (3, 5), "odd": (7,)}
    return {f"{dtype}.{what}": some(dtype, *shape) for dtype in dtypes for what, shape in shapes.items()}


def model_state() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    embedding = torch.randn(5, 4)
    return {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7, "name": "näme", "nothing": None,
        "big": 1 << 80, "infinite": math.inf, "complex": 1 - 2j, "raw": b"\0\xff", "pair": (1, (2.0, "x")),
        "list": [torch.ones(2), 3], "tied": {"in": embedding, "out": embedding}, "none": [],
        "flags": [True, [1, "a"], {"k": 2.5}], "strided": torch.arange(6).view(2, 3).t(),
    }  # fmt: skip


# Names, and a function of the user


def selected(state: dict[str, Any], **selection: Any) -> dict[str, Any]:
    """What is exported of a state: tensors and values by name."""
    whole = Selection(**selection).of(whole_of(state))
    raw = whole.read([entry.name for entry in whole.own])
    names = list(whole.entries)
    return build(whole.tree, lambda n: from_bytes(whole.entries[names[n]], raw[whole.ties.get(names[n], names[n])]),
                 lambda n: decode_plain(whole.plain[n]))  # fmt: skip


def test_names_are_kept_dropped_and_renamed() -> None:
    state = model_state()
    made = selected(state, keep=["model.*", "step"], drop=["*.bias"], rename=[(r"^model\.(\d)", r"layers.\1"),
                                                                          ("weight$", "w")])  # fmt: skip
    same_as(made, {"layers.0.w": state["model"]["0.weight"], "layers.1.w": state["model"]["1.weight"], "step": 7})
    tied = Selection(keep=["tied.*"], rename=[("tied", "embedding")]).of(whole_of(state))
    assert tied.ties == {"embedding.out": "embedding.in"}
    assert Selection(drop=["tied.in"]).of(whole_of(state)).ties == {}, "the other one has its bytes"
    same_as(selected(state)["pair"], (1, (2.0, "x")))  # without a selection the state is nested as it was


def test_a_function_makes_other_tensors() -> None:
    def convert(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        assert "step" not in tensors
        q, k, v = tensors.pop("qkv").chunk(3)
        return {"q": q, "k": k.t(), "v": v.bfloat16(), "both": torch.stack([tensors["a"], tensors["b"]]), "again": q}

    state: dict[str, Any] = {"model": {"qkv": torch.randn(6, 4), "a": torch.ones(2), "b": torch.zeros(2)}, "step": 3}
    rename = [(r"^model\.", "")]
    q, k, v = state["model"]["qkv"].chunk(3)
    both = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    same_as(selected(state, rename=rename, convert=convert),
            {"q": q, "k": k.t(), "v": v.bfloat16(), "both": both, "again": q})  # fmt: skip
    made = Selection(rename=rename, convert=convert).of(whole_of(state))
    assert made.ties == {"again": "q"} and made.left_out == ("step",)


@pytest.mark.parametrize(
    ("selection", "text"),
    [
        ({"keep": ["model"]}, r"has a name like this(?s:.)*expected: a\.w, a\.b, b\.w, \.\.\.\n *found: *model"),
        ({"drop": ["c.*"]}, "has a name like this"),
        ({"rename": [("^c", "d")]}, "has a name like this"),
        ({"rename": [("(", "d")]}, "cannot rename"),
        ({"rename": [("a", r"\2")]}, "cannot rename"),
        ({"rename": [("^[ab]", "x")]}, r"a\.w and b\.w would get the same name \[at 'x\.w'\]"),
    ],
)
def test_a_pattern_that_fits_nothing_and_two_tensors_of_one_name_are_errors(selection: Any, text: str) -> None:
    state = {"a": {"w": torch.ones(4, 6), "b": torch.ones(4)}, "b": {"w": torch.ones(4, 6)}}
    with pytest.raises(ConfigError, match=text):
        Selection(**selection).of(whole_of(state))


# safetensors


def test_safetensors_hold_every_dtype_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    state: dict[str, Any] = of_every_dtype(list(DTYPES))
    torch.save(state, tmp_path / "expected.pt")
    written = write_safetensors(whole_of({**state, "step": 3}), open_store(tmp_path))
    assert written.files == {"model.safetensors": (tmp_path / "model.safetensors").stat().st_size}
    assert (written.tensors, written.left_out) == (len(state), ("step",))
    without_mlflash(tmp_path, """
        from safetensors import safe_open
        expected = torch.load("expected.pt", weights_only=True)
        with safe_open("model.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert set(file.keys()) == set(expected)
            same({name: file.get_tensor(name) for name in expected}, expected)
    """)  # fmt: skip


# torch.save


def test_a_torch_file_holds_every_dtype_and_every_plain_leaf(tmp_path: Path) -> None:
    state = {**model_state(), "dtypes": of_every_dtype(TORCH_DTYPES)}
    torch.save(state, tmp_path / "expected.pt")
    arrays = {"f8": np.arange(3.0), "u4": np.array(5, dtype="u4"), "bool": np.array([[True, False]])}
    whole = whole_of({**state, "arrays": arrays, "number": np.float64(0.1)})
    written = write_torch(whole, open_store(tmp_path))
    assert written.files == {"state.pt": (tmp_path / "state.pt").stat().st_size}
    assert written.ties == {"tied.out": "tied.in"}
    without_mlflash(tmp_path, """
        expected = torch.load("expected.pt", weights_only=True)
        for mmap in (False, True):
            found = torch.load("state.pt", weights_only=True, mmap=mmap)
            arrays = found.pop("arrays")
            assert type(found["number"]) is float and found.pop("number") == 0.1
            same(found, expected)
            assert list(found) == list(expected)
            assert arrays["f8"].tolist() == [0, 1, 2] and arrays["u4"].dtype == torch.uint32
            assert arrays["bool"].tolist() == [[True, False]]
            found["tied"]["in"].untyped_storage()[0] = 1
            assert found["tied"]["out"].untyped_storage()[0] == 1
    """)  # fmt: skip


REFUSED: dict[str, tuple[Callable[..., object], list[Any]]] = {
    "safetensors": (write_safetensors, [some("complex128", 2), some("float4_e2m1fn_x2", 2), np.array(["a"]),
                                        np.array([1.0], dtype=">f4"), np.ones(2, dtype=np.longdouble)]),
    "torch": (write_torch, [np.array(["a"]), torch.empty(2, dtype=torch.uint8).view(torch.int4)]),
    "dcp": (write_dcp, [torch.empty(2, dtype=torch.uint8).view(torch.int4)]),
}  # fmt: skip


@pytest.mark.parametrize("form", REFUSED)
def test_what_a_format_cannot_hold_is_refused_by_name_before_anything_is_written(form: str, tmp_path: Path) -> None:
    write, values = REFUSED[form]
    for value in values:
        with pytest.raises(StateError, match=r"at 'a\.b'"):
            write(whole_of({"a": {"a": torch.ones(9), "b": value}}), open_store(tmp_path))
        assert not list(tmp_path.iterdir())


# PyTorch DCP


def dcp_state() -> dict[str, Any]:
    """A state with all that DCP treats in a way of its own."""
    return {
        **model_state(), "dtypes": of_every_dtype(DCP_DTYPES), "array": np.arange(4), "scalar": np.float32(0.1),
        "tuple": (torch.ones(2), {"x": [torch.zeros(1)]}), "nested": [[1, [torch.ones(1)]], [[]], ()], "empty": {},
        "keys": {3: {(1, "a"): torch.ones(1)}}, "arrays": [np.ones(2)],
    }  # fmt: skip


def test_plain_dcp_loads_an_export(tmp_path: Path) -> None:
    state = dcp_state()
    torch.save(state, tmp_path / "expected.pt")
    (tmp_path / "out").mkdir()
    written = write_dcp(whole_of(state), open_store(tmp_path).at("out"), file_nbytes=500)
    assert list(written.files)[-1] == ".metadata" and "__0_1.distcp" in written.files
    assert written.files == {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert written.ties == {"tied.out": "tied.in"}
    without_mlflash(tmp_path, """
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
        from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
        expected = torch.load("expected.pt", weights_only=False)
        def blank(value):
            if isinstance(value, torch.Tensor):
                return torch.empty(value.shape, dtype=value.dtype)
            if isinstance(value, dict):
                return {key: blank(item) for key, item in value.items()}
            return [blank(item) for item in value] if isinstance(value, list) else "to be replaced"
        state = blank(expected)
        dcp.load(state, checkpoint_id="out", no_dist=True)
        same(state, expected)
        dcp.save(expected, checkpoint_id="theirs", no_dist=True)
        ours, theirs = (dcp.FileSystemReader(path).read_metadata() for path in ("out", "theirs"))
        assert ours.state_dict_metadata == theirs.state_dict_metadata and ours.version == theirs.version
        assert ours.planner_data == theirs.planner_data and ours.storage_data.keys() == theirs.storage_data.keys()
        found = [{}, {}]
        for state, path in zip(found, ("out", "theirs")):
            _load_state_dict(state, dcp.FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
        same(*found)
        dcp_to_torch_save("out", "whole.pt")
        same(torch.load("whole.pt", weights_only=False), found[1])
        part = {"model": {"0.weight": torch.zeros(3, 4)}}
        dcp.load(part, checkpoint_id="out", no_dist=True)
        same(part["model"]["0.weight"], expected["model"]["0.weight"])
    """)  # fmt: skip


# From PyTorch DCP


def same_as(found: Any, expected: Any) -> None:
    """Compare as the other processes do."""
    names: dict[str, Any] = {"torch": torch}
    exec(PRELUDE[PRELUDE.index("def same") :], names)
    names["same"](found, expected)


def test_a_checkpoint_of_plain_dcp_on_two_ranks_is_read(tmp_path: Path) -> None:
    torch.save(dcp_state(), tmp_path / "expected.pt")
    torch.multiprocessing.spawn(save_sharded, (tmp_path,), nprocs=2)
    state = read_dcp(tmp_path / "theirs")
    expected = torch.load(tmp_path / "expected.pt", weights_only=False)
    # DCP itself loses empty dicts and makes keys strings.
    del expected["empty"]
    expected["keys"] = {"3": {"(1, 'a')": expected["keys"][3][1, "a"]}}
    expected["optimizer"]["state"] = {str(key): value for key, value in expected["optimizer"]["state"].items()}
    expected |= {
        "sharded": torch.arange(21.0).view(7, 3),
        "columns": torch.arange(5).view(1, 5),
        "alike": torch.ones(3),
    }
    same_as(state, expected)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def test_nothing_in_a_checkpoint_runs_unless_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save({"a": {"b": Evil()}, "c": 1}, storage_writer=FileSystemWriter("theirs"), no_dist=True)
    with pytest.raises(StateError, match=r"trust_pickle=True.*at 'a\.b'.*\n.*mkdir"):
        read_dcp("theirs")
    assert not Path("ran").exists()
    assert read_dcp("theirs", trust_pickle=True) == {"a": {"b": None}, "c": 1} and Path("ran").exists()
    Path("theirs/.metadata").write_bytes(pickle.dumps(Evil()))
    Path("ran").rmdir()
    with pytest.raises(StateError, match=r"trust_pickle=True.*\n.*mkdir"):
        read_dcp("theirs")
    assert not Path("ran").exists()


def replaced(raw: bytes, old: bytes, new: bytes, count: int) -> bytes:
    """Replace bytes that occur so often or more often."""
    assert raw.count(old) >= count
    return raw.replace(old, new, count)


def test_a_checkpoint_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StructureMismatch, match=r"no \.metadata"):
        read_dcp(tmp_path)
    state = {"a": torch.ones(100), "b": 1}
    write_dcp(whole_of(state), open_store(tmp_path))
    same_as(read_dcp(tmp_path), state)
    metadata, file = tmp_path / ".metadata", tmp_path / "__0_1.distcp"
    described, raw = metadata.read_bytes(), file.read_bytes()
    file.write_bytes(raw[:-10])
    with pytest.raises(StructureMismatch, match=r"too short .*at 'b'"):
        read_dcp(tmp_path)
    file.write_bytes(replaced(raw, b"PK\x05\x06", bytes(4), 1))
    with pytest.raises(StructureMismatch, match=r"a file of this checkpoint is damaged .*at 'b'"):
        read_dcp(tmp_path)
    file.write_bytes(raw)
    nameless = replaced(described, b"sizes", b"sizez", 1)
    for damaged in (described[:-20], b"", b"\x80\x04N.", nameless):
        metadata.write_bytes(damaged)
        with pytest.raises(StructureMismatch, match=r"is damaged|another type"):
            read_dcp(tmp_path)
    metadata.write_bytes(replaced(described, b"__0_0.distcp", b"../_0.distcp", 1))
    with pytest.raises(StructureMismatch, match="names no file of this directory"):
        read_dcp(tmp_path)
    metadata.write_bytes(replaced(described, b"__0_0.distcp", b"__0_9.distcp", 1))
    with pytest.raises(StructureMismatch, match=r"a file of this checkpoint is missing .*at 'a'"):
        read_dcp(tmp_path)
    for sizes, why in ((1, "parts of this tensor are not in"), (2, "a part of this tensor has another shape")):
        metadata.write_bytes(replaced(described, b"K\x64\x85", b"K\x63\x85", sizes))
        with pytest.raises(StructureMismatch, match=why):
            read_dcp(tmp_path)


# Hugging Face


CONVERT = """
import torch

def to_llama(tensors):
    made = {}
    for name, tensor in tensors.items():
        if name.endswith("qkv.weight"):
            made |= {name.replace("qkv", f"{part}_proj"): part_of for part, part_of in zip("qkv", tensor.chunk(3))}
        else:
            made[name] = tensor
    return made
"""


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_from_pretrained_opens_what_the_command_exports(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}
    config = (transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=16, **sizes) if kind == "gpt2" else
              transformers.LlamaConfig(num_hidden_layers=2, num_attention_heads=2, hidden_size=8, intermediate_size=12,
                                       tie_word_embeddings=False, **sizes))  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.arange(12).view(2, 6)
    torch.save((tokens, model(tokens).logits.detach()), tmp_path / "expected.pt")
    config.save_pretrained(tmp_path / "config")
    (tmp_path / "config" / "model.safetensors.index.json").write_text("{}")
    (tmp_path / "config" / "vocab.txt").symlink_to(__file__)
    (tmp_path / "convert.py").write_text(CONVERT)
    # What a training saves: fused, under a prefix, with an optimizer.
    weights, more = model.state_dict(), []
    if kind == "llama":
        for name in [name for name in weights if name.endswith("q_proj.weight")]:
            parts = [weights.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
            weights[name.replace("q_proj", "qkv")] = torch.cat(parts)
        more = ["--convert", f"{tmp_path / 'convert.py'}:to_llama"]
    with Checkpointer(tmp_path / "drained", job="t", memory=str(tmp_path)) as ckpt:
        ckpt.save(7, {"model": weights, "optimizer": {"x": torch.ones(1)}, "step": 7}).wait()
        ckpt.drain().wait()
    for out, words in (("bin", ["--to", "torch", "--flat"]), ("one", ["--to", "safetensors"]),
                       ("many", ["--to", "safetensors", "--shard-size", "2kB"])):  # fmt: skip
        words += ["--keep", "model.*", "--rename", r"^model\.", "", *more, "--hf-config", str(tmp_path / "config"),
                  "--directory", str(tmp_path / "drained"), "--json"]  # fmt: skip
        result = CliRunner().invoke(main, ["export", "7", str(tmp_path / out), *words])
        assert result.exit_code == 0, result.output
        exported = json.loads(result.stdout)
        assert bool(exported["ties"]) == (kind == "gpt2")
        assert {"config.json", "vocab.txt"} <= exported["files"].keys()
        assert ("model.safetensors.index.json" in exported["files"]) == (out == "many")
    assert len(list((tmp_path / "many").glob("model-*"))) > 2
    without_mlflash(tmp_path, """
        from transformers import AutoModelForCausalLM
        tokens, logits = torch.load("expected.pt")
        for out in ("bin", "one", "many"):
            model, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
            assert not any(report.values()), report
            assert torch.equal(model.eval()(tokens).logits, logits), out
    """)  # fmt: skip


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--convert", "nowhere.py:f"], "give a Python file and a function"),
        (["--convert", __file__ + ":nothing"], "has no function nothing"),
        (["--hf-config", "."], "no Hugging Face config.json"),
        (["--rename", "^nothing", ""], "has a name like this"),
    ],
)
def test_the_command_says_what_is_wrong_and_writes_no_tensors(words: list[str], text: str, tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with Checkpointer(tmp_path / "drained", job="t", memory=str(tmp_path)) as ckpt:
        ckpt.save(7, {"w": torch.ones(2)}).wait()
        ckpt.drain().wait()
    result = CliRunner().invoke(main, ["export", "7", "out", "--to", "safetensors", "-d", "drained", *words])
    assert result.exit_code and text in result.output
    assert not list(tmp_path.glob("out/*.safetensors"))
