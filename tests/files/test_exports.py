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
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from waiting import until

from mlflash import Checkpointer
from mlflash.cli import main
from mlflash.errors import ConfigError, StateError, StructureMismatch
from mlflash.exports import dcp_directory, hugging_face, safetensors_files, torch_file
from mlflash.exports.imports import read_dcp
from mlflash.exports.mapping import plan, read_rules
from mlflash.exports.outputs import Batches
from mlflash.state.flatten import flatten
from mlflash.state.leaves import Entry, live_bytes
from mlflash.storage import dcp_files
from mlflash.storage.dcp_keys import keys_of
from mlflash.storage.file_holes import FileWithHoles
from mlflash.storage.store import open_store
from mlflash.storage.torch_files import hollow
from mlflash.storage.torch_files import save as save_hollow
from mlflash.storage.whole_state import Written

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


class InMemory:
    """A `Whole` of a live state."""

    def __init__(self, state: Any):
        flat = flatten(state)
        names = [leaf.entry.name for leaf in flat.leaves]
        self.step, self.tree, self.plain = 3, flat.structure.tree, flat.plain
        self.entries = {leaf.entry.name: leaf.entry for leaf in flat.leaves}
        self.ties = {name: names[leaf.tie] for name, leaf in zip(names, flat.leaves, strict=True) if leaf.tie >= 0}
        self.values = {leaf.entry.name: leaf.value for leaf in flat.leaves}
        self.asked: list[tuple[str, ...]] = []

    def bytes_of(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        self.asked.append(tuple(names))
        return {name: live_bytes(self.values[name]) for name in names}


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


DCP_DTYPES = [*safetensors_files.DTYPES, "complex32", "complex128", "float4_e2m1fn_x2"]
DTYPES = [*DCP_DTYPES, "bits8", "bits16"]


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


# Mapping


def mapped(state: dict[str, Any], rules: str) -> dict[str, torch.Tensor]:
    """What rules make of tensors, by way of bytes."""
    whole = InMemory(state)
    outputs = plan(whole.entries, read_rules(rules), whole.ties)
    assert not whole.asked, "a plan reads nothing"
    batches = Batches(whole, outputs)
    made = {}
    for output in outputs:
        raw = batches.source(output)()
        assert raw.nbytes == output.entry.nbytes
        made[output.entry.name] = torch.from_numpy(raw.copy()).view(getattr(torch, output.entry.dtype)).view(
            output.entry.shape
        )  # fmt: skip
    return made


def test_rules_rename_drop_split_join_stack_and_transpose_in_order() -> None:
    layer = {
        "attn.qkv.weight": some("bfloat16", 12, 4), "gate": some("float8_e5m2", 6, 4), "up": some("float8_e5m2", 2, 4),
        "c_fc": some("complex128", 4, 6), "inv_freq": torch.ones(2),
        **{f"experts.{n}.w": some("float32", 2, 3) for n in range(12)},
    }  # fmt: skip
    model = {f"layers.{i}.{name}": some(str(t.dtype)[6:], *t.shape) for i in range(2) for name, t in layer.items()}
    state = {"model": model, "optimizer": {"x": torch.ones(1)}}
    made = mapped(state, """
        keep model.**                       # no optimizer
        drop *.*.*.inv_freq
        rename    model.{rest...} -> {rest...}
        split     layers.{i}.attn.qkv.weight -> layers.{i}.attn.{q,k,v}.weight  sizes=8,2,2
        join      layers.{i}.gate, layers.{i}.up -> layers.{i}.gate_up
        transpose layers.{i}.c_fc
        stack     layers.{i}.experts.{n}.w -> layers.{i}.experts
    """)  # fmt: skip
    expected = {}
    for i in range(2):
        old = {name: model[f"layers.{i}.{name}"] for name in layer}
        q, k, v = old["attn.qkv.weight"].split([8, 2, 2])
        gate_up = torch.cat([old["gate"].view(torch.uint8), old["up"].view(torch.uint8)]).view(torch.float8_e5m2)
        experts = torch.stack([old[f"experts.{n}.w"] for n in range(12)])
        new = {"attn.q.weight": q, "attn.k.weight": k, "attn.v.weight": v, "gate_up": gate_up, "c_fc": old["c_fc"].t(),
               "experts": experts}  # fmt: skip
        expected.update({f"layers.{i}.{name}": tensor for name, tensor in new.items()})
    assert list(made) == list(expected), "in the order of what they are made of"
    for name, tensor in expected.items():
        assert live_bytes(made[name]).tobytes() == live_bytes(tensor).tobytes(), name
        assert (made[name].dtype, made[name].shape) == (tensor.dtype, tensor.shape)


def test_groups_split_and_join_what_is_interleaved() -> None:
    qkv = torch.arange(4 * 3 * 2 * 5).view(24, 5)  # four heads of q, k, v with two rows each
    made = mapped({"qkv": qkv}, "split qkv -> q, k, v groups=4")
    for name, number in (("q", 0), ("k", 1), ("v", 2)):
        assert torch.equal(made[name], qkv.view(4, 3, 2, 5)[:, number].reshape(8, 5))
    assert torch.equal(mapped(made, "join q, k, v -> qkv groups=4")["qkv"], qkv)
    last = mapped({"w": qkv}, "split w -> a, b dim=-1 sizes=2,3")
    assert torch.equal(last["b"], qkv[:, 2:])


def test_unstack_undoes_stack_and_transpose_takes_any_order() -> None:
    experts = torch.randn(11, 3, 2)
    made = mapped({"experts": experts}, "unstack experts -> experts.{n}.w")
    assert torch.equal(made["experts.10.w"], experts[10]) and len(made) == 11
    assert torch.equal(mapped(made, "stack experts.{n}.w -> experts")["experts"], experts)
    assert torch.equal(mapped({"x": experts}, "transpose x dims=2,0,1")["x"], experts.permute(2, 0, 1))
    assert mapped({"x": experts}, "stack x -> y dim=-1")["y"].shape == (11, 3, 2, 1)


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ("\n\nrenam a.w -> b", "the mapping, line 3: unknown verb"),
        ("rename a.w", "rename NAME -> NAME"),
        ("drop a.w -> b", "drop NAME, NAME, …"),
        ("rename a.w, b.w -> c", "rename NAME -> NAME"),
        ("rename {x.w -> c", "not a name or a pattern"),
        ("rename a.w -> *", "name this placeholder"),
        ("rename {x}.w -> {y}.w", "this placeholder has no value"),
        ("unstack a.w -> b", "the new name needs a placeholder for the index"),
        ("join {x}.w, *.b -> c", "placeholders with the same names"),
        ("transpose a.w dim=1", "unknown option"),
        ("split a.w -> x, y sizes=1,2,3", "each part needs its size"),
        ("split a.w -> x, y groups=0", "above 0"),
        ("split a.w -> x, y dim=0,1", "takes one number"),
        ("drop a.w\ndrop a.w", "line 2: a.w matches no tensor"),
        ("keep layers.{i}.w", "matches no tensor; tensors are, for example: a.w, a.b, b.w"),
        ("rename a.w -> b.w", "another tensor already has this name: rename a.w -> b.w [at 'b.w']"),
        ("rename {x}.w -> w", "another tensor already has this name: rename {x}.w -> w [at 'w']"),
        ("split a.w -> x, x", "two parts get the same name"),
        ("split a.w -> x, y, z", "[at 'a.w']\n  expected: 3 equal parts\n  found:    4, in shape (4, 6)"),
        ("split a.w -> x, y sizes=1,2", "expected: 1 + 2"),
        ("split a.w -> x, y dim=2", "no dimension 2"),
        ("transpose a.b", "expected: an order of the 1 dimensions of (4,)"),
        ("join a.w, a.b -> c", "cannot be joined with 'a.w'"),
        ("join {x}.w, {x}.b -> {x}", "missing, and 'b' needs it: join {x}.w, {x}.b -> {x} [at 'b.b']"),
        ("stack e.{n} -> e", "the tensors for 'e' have numbers up to 2, but 1 is missing"),
    ],
)
def test_a_rule_that_does_not_fit_is_named_with_line_and_tensor(rules: str, text: str) -> None:
    state = {"a.w": torch.ones(4, 6), "a.b": torch.ones(4), "b.w": torch.ones(4, 6), "e.0": torch.ones(2),
             "e.2": torch.ones(2)}  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        plan(InMemory(state).entries, read_rules(rules))
    assert text in str(caught.value)


@given(st.text(alphabet="ab{}.*,->=1 \n#{q,k}sizesplit", max_size=60))
def test_any_text_is_rules_or_an_error_that_names_the_line(text: str) -> None:
    try:
        plan(InMemory({"a": torch.ones(2), "b.1": torch.ones(2)}).entries, read_rules(f"split {text}"))
    except ConfigError as error:
        assert "the mapping, line " in str(error)


def test_what_is_read_at_once_is_bounded_and_nothing_is_read_twice() -> None:
    whole = InMemory({str(i): torch.full((10,), i, dtype=torch.uint8) for i in range(9)} | {"large": torch.ones(100)})
    outputs = plan(whole.entries, read_rules("split 0 -> 0a, 0b"))
    batches = Batches(whole, outputs, batch_nbytes=35)
    for output in outputs:
        assert batches.source(output)().nbytes == output.entry.nbytes
    assert whole.asked == [("0", "1", "2"), ("3", "4", "5"), ("6", "7", "8"), ("large",)]


# safetensors


def test_safetensors_hold_every_dtype_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    state: dict[str, Any] = of_every_dtype(list(safetensors_files.DTYPES))
    torch.save(state, tmp_path / "expected.pt")
    written = safetensors_files.write(InMemory({**state, "step": 3}), open_store(tmp_path))
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


def test_every_tensor_in_safetensors_is_aligned_to_its_elements(tmp_path: Path) -> None:
    state = {"a": some("uint8", 3), "b": some("bfloat16", 5), "c": torch.ones(2), "d": np.arange(3.0)}
    safetensors_files.write(InMemory(state), open_store(tmp_path))
    raw = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert length % 8 == 0
    assert [header[name]["data_offsets"] for name in "dcba"] == [[0, 24], [24, 32], [32, 42], [42, 45]]
    assert raw[8 + length :][:24] == np.arange(3.0).tobytes()


def test_shards_are_cut_in_order_and_indexed_as_hugging_face_does(tmp_path: Path) -> None:
    state: dict[str, Any] = {str(i): torch.full((10,), i, dtype=torch.uint8) for i in range(5)} | {
        "large": torch.ones(99)
    }
    state["tied"] = state["1"]
    written = safetensors_files.write(InMemory(state), open_store(tmp_path), shard_nbytes=25)
    names = [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    assert list(written.files) == [*names, "model.safetensors.index.json"] and written.ties == {"tied": "1"}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 50 + 4 * 99}
    where = {"0": 0, "1": 0, "2": 1, "3": 1, "4": 2, "large": 3}
    assert index["weight_map"] == {name: names[shard] for name, shard in where.items()}


@pytest.mark.parametrize("value", [some("complex128", 2), some("float4_e2m1fn_x2", 2), np.array(["a"]),
                                   np.array([1.0], dtype=">f4"), np.array(["2020-01-01"], dtype="M8[D]"),
                                   np.ones(2, dtype=np.longdouble)])  # fmt: skip
def test_safetensors_refuse_what_they_cannot_hold_by_name(value: Any, tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"(?s)\[at 'a\.b'\].*expected: .*float32"):
        safetensors_files.write(InMemory({"a": {"b": value}}), open_store(tmp_path))
    assert not list(tmp_path.iterdir())


def test_safetensors_are_written_without_loading_torch() -> None:
    program = "import sys, mlflash.exports.safetensors_files; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd="/")


# torch.save


def test_a_torch_file_holds_every_dtype_and_every_plain_leaf(tmp_path: Path) -> None:
    state = {**model_state(), "dtypes": of_every_dtype(DTYPES)}
    torch.save(state, tmp_path / "expected.pt")
    arrays = {"f8": np.arange(3.0), "u4": np.array(5, dtype="u4"), "bool": np.array([[True, False]])}
    whole = InMemory({**state, "arrays": arrays, "number": np.float64(0.1)})
    written = torch_file.write(whole, open_store(tmp_path))
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


def test_a_flat_torch_file_is_a_dict_of_tensors_by_name(tmp_path: Path) -> None:
    state = {"model": {"w": torch.randn(2, 3), "b": [torch.ones(2)]}, "step": 3}
    flat = torch_file.write(InMemory(state), open_store(tmp_path), name="pytorch_model.bin", flat=True)
    assert flat.left_out == ("step",)
    torch_file.write(
        InMemory(state), open_store(tmp_path), read_rules("keep **.w\ntranspose **.w\nrename {a...}.w -> {a}.v")
    )
    torch.save(state, tmp_path / "expected.pt")
    without_mlflash(tmp_path, """
        model = torch.load("expected.pt")["model"]
        same(torch.load("pytorch_model.bin"), {"model.w": model["w"], "model.b.0": model["b"][0]})
        same(torch.load("state.pt"), {"model.v": model["w"].t()})
    """)  # fmt: skip


def test_a_torch_file_refuses_what_torch_cannot_load_by_name(tmp_path: Path) -> None:
    for value in (np.array(["a"]), torch.empty(2, dtype=torch.uint8).view(torch.int4)):
        with pytest.raises(StateError, match=r"at 'a\.b'"):
            torch_file.write(InMemory({"a": {"b": value}}), open_store(tmp_path))


def test_the_holes_of_a_torch_file_take_no_memory() -> None:
    skeleton = FileWithHoles()
    tensors = hollow([("float32", (1 << 37,)), ("bfloat16", (1 << 36,))])
    starts = save_hollow({"a": tensors[0], "b": [tensors[1], tensors[0]]}, skeleton)
    status = os.fstat(skeleton.file.fileno())
    assert status.st_size > (1 << 39) + (1 << 37) and status.st_blocks * 512 < 1 << 20
    assert len(starts) == 2 and starts[1] > starts[0] + (1 << 39)
    assert all(start % 64 == 0 for start in starts)
    skeleton.close()


# PyTorch DCP


def dcp_state() -> dict[str, Any]:
    """A state with all that DCP treats in a way of its own."""
    return {
        **model_state(), "dtypes": of_every_dtype(DCP_DTYPES), "array": np.arange(4), "scalar": np.float32(0.1),
        "tuple": (torch.ones(2), {"x": [torch.zeros(1)]}), "nested": [[1, [torch.ones(1)]], [[]], ()], "empty": {},
        "keys": {3: {(1, "a"): torch.ones(1)}}, "arrays": [np.ones(2)],
    }  # fmt: skip


def test_the_keys_are_those_of_dcp() -> None:
    whole = InMemory(state := {**dcp_state(), 3: [[{}], [{}, [[]]]]})
    keys = keys_of(whole.tree, list(whole.entries.values()))
    flat, paths = flatten_state_dict(state)
    assert keys.paths == paths and list(keys.paths) == list(flat)
    assert set(keys.tensors) == {key for key, value in flat.items() if isinstance(value, torch.Tensor)}
    assert {*keys.tensors, *keys.objects} == set(flat)


def test_what_dcp_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    sub_byte = torch.empty(2, dtype=torch.uint8).view(torch.int4)
    with pytest.raises(StateError, match=r"at 'b'"):
        dcp_directory.write(InMemory({"a": torch.ones(9), "b": sub_byte}), open_store(tmp_path), file_nbytes=1)
    assert not list(tmp_path.iterdir())
    whole = InMemory([torch.ones(1)])
    with pytest.raises(StateError, match="holds a dict"):
        keys_of(whole.tree, list(whole.entries.values()))


def test_keys_that_read_alike_are_told_apart() -> None:
    whole = InMemory({"a.b": 1, "a": {"b": 2}, "c": 3})
    assert keys_of(whole.tree, list(whole.entries.values())).paths == {
        "'a.b'": ("a.b",), "'a'.'b'": ("a", "b"), "c": ("c",)}  # fmt: skip


def test_plain_dcp_loads_an_export(tmp_path: Path) -> None:
    state = dcp_state()
    torch.save(state, tmp_path / "expected.pt")
    (tmp_path / "out").mkdir()
    written = dcp_directory.write(InMemory(state), open_store(tmp_path).at("out"), file_nbytes=500)
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


def cut_in_rows(name: str, tensor: torch.Tensor, *rows: int) -> list[tuple[Entry, np.ndarray]]:
    """Pieces as ranks with row shards have them."""
    pieces, at = [], 0
    for part in tensor.split(list(rows)):
        offset = (at, *(0,) * (tensor.dim() - 1))
        raw = live_bytes(part)
        pieces.append((Entry(name, "tensor", str(tensor.dtype)[6:], tuple(tensor.shape), offset, tuple(part.shape), 0,
                             raw.nbytes), raw))  # fmt: skip
        at += len(part)
    return pieces


def write_as_ranks(directory: Path, pieces: Sequence[Sequence[tuple[Entry, np.ndarray]]], extras: dict[str, Any],
                   ties: dict[str, str]) -> None:  # fmt: skip
    """What a writer on many ranks does: a file of its own each, then the metadata."""
    files = []
    for rank, own in enumerate(pieces):
        entries, objects = [entry for entry, _ in own], {key: dcp_files.pickled(value) for key, value in extras.items()}
        sources: list[Callable[[], np.ndarray]] = [lambda raw=raw: raw for _, raw in own]  # type: ignore[misc]
        skeleton, places, starts = dcp_files.rank_file(entries, sources, objects)
        raw = b"".join(skeleton.stream(100))
        assert [raw[start : start + entry.nbytes] for start, entry in zip(starts, entries, strict=True)] == [
            bytes(source()) for source in sources
        ]
        store = open_store(directory)
        store.make()
        store.write(f"__{rank}_0.distcp", [raw])
        files.append(dcp_files.Contents(f"__{rank}_0.distcp", entries, list(objects), places))
        skeleton.close()
    names = dict.fromkeys([entry.name for own in pieces for entry, _ in own])
    paths: dict[str, dcp_files.Path] = {key: tuple(key.split(".")) for key in [*names, *ties, *extras]}
    open_store(directory).write(".metadata", [dcp_files.metadata(files, paths, ties)])


TWO_RANKS = """
import datetime, faulthandler
faulthandler.dump_traceback_later(60, exit=True)
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://{directory}/rendezvous", rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=60))
mesh = init_device_mesh("cpu", (2,))
expected = torch.load("expected.pt", weights_only=False)
"""


def test_parts_of_many_ranks_load_whole_and_in_other_shards(tmp_path: Path) -> None:
    odd, scalar, empty = some("bfloat16", 7, 4), some("float32"), torch.empty(0, 3)
    pieces = list(map(list, zip(cut_in_rows("m.odd", odd, 3, 0, 4), *([cut_in_rows("m.empty", empty, 0)[0]] * 3,),
                                strict=True)))  # fmt: skip
    zero = live_bytes(scalar)
    for own in pieces:  # each rank has it whole
        own.append((Entry("m.scalar", "tensor", "float32", (), (), (), 0, 4), zero))
    write_as_ranks(tmp_path / "out", pieces, {"step": 7, "list": [1, "a"]}, {"m.tied": "m.odd"})
    state = {"m": {"odd": odd, "tied": odd, "scalar": scalar, "empty": empty}, "step": 7, "list": [1, "a"]}
    torch.save(state, tmp_path / "expected.pt")
    same_as(read_dcp(tmp_path / "out"), state)
    on_two_ranks(tmp_path, """
        state = {"m": {"odd": distribute_tensor(torch.zeros(7, 4, dtype=torch.bfloat16), mesh, [Shard(1)]),
                       "tied": distribute_tensor(torch.zeros(7, 4, dtype=torch.bfloat16), mesh, [Shard(0)]),
                       "scalar": torch.zeros(()), "empty": torch.empty(0, 3)}, "step": 0, "list": []}
        dcp.load(state, checkpoint_id="out")
        state["m"] = {key: getattr(value, "full_tensor", lambda: value)() for key, value in state["m"].items()}
        same(state, expected)
    """)  # fmt: skip


def test_parts_that_are_not_the_whole_are_refused() -> None:
    first, second = (entry for entry, _ in cut_in_rows("a", torch.ones(5, 2), 2, 3))

    def contents(*pieces: Entry) -> dcp_files.Contents:
        return dcp_files.Contents("__0_0.distcp", pieces, ["step"], [(0, 10)] * (len(pieces) + 1))

    paths: dict[str, dcp_files.Path] = {"a": ("a",), "step": ("step",)}
    assert pickle.loads(dcp_files.metadata([contents(first, second, first)], paths))
    with pytest.raises(StructureMismatch, match=r"at 'a'.*\n.*10 elements\n.*found:    4"):
        dcp_files.metadata([contents(first)], paths)
    other = Entry("a", "tensor", "float16", (5, 2), (2, 0), (3, 2), 0, 12)
    with pytest.raises(StructureMismatch, match=r"different tensors of this name.*at 'a'"):
        dcp_files.metadata([contents(first, other)], paths)
    with pytest.raises(StructureMismatch, match=r"no file holds .*at 'b'"):
        dcp_files.metadata([contents(first, second)], {**paths, "b": ("b",)})


# From PyTorch DCP


def same_as(found: Any, expected: Any) -> None:
    """Compare as the other processes do."""
    names: dict[str, Any] = {"torch": torch}
    exec(PRELUDE[PRELUDE.index("def same") :], names)
    names["same"](found, expected)


def on_two_ranks(directory: Path, program: str) -> None:
    """Run a program in two processes that have a gloo group and only the stock libraries."""
    text = PRELUDE + TWO_RANKS.replace("{directory}", str(directory)) + textwrap.dedent(program)
    text += "\ndist.barrier()\ndist.destroy_process_group()\n"
    files = [open(directory / f"rank{rank}.txt", "w+") for rank in range(2)]
    ranks = [
        subprocess.Popen([sys.executable, "-c", text, str(rank)], cwd=directory, stderr=file,
                         env={**os.environ, "OMP_NUM_THREADS": "1"}) for rank, file in enumerate(files)
    ]  # fmt: skip

    def codes() -> list[int | None]:
        return [rank.poll() for rank in ranks]

    try:
        until(lambda: None not in codes() or any(codes()), "both ranks end, or one fails")
        ended = codes()
    finally:
        for process, file in zip(ranks, files, strict=True):
            process.kill()
            process.wait()
            file.close()
    assert ended == [0, 0], "\n".join((directory / f"rank{rank}.txt").read_text() for rank in range(2))


def test_a_checkpoint_of_plain_dcp_on_two_ranks_is_read(tmp_path: Path) -> None:
    torch.save(dcp_state(), tmp_path / "expected.pt")
    on_two_ranks(tmp_path, """
        state = {**expected, "sharded": distribute_tensor(torch.arange(21.0).view(7, 3), mesh, [Shard(0)]),
                 "columns": distribute_tensor(torch.arange(5).view(1, 5), mesh, [Shard(1)]),
                 "alike": distribute_tensor(torch.ones(3), mesh, [Replicate()])}
        dcp.save(state, checkpoint_id="theirs")
    """)  # fmt: skip
    found = read_dcp(tmp_path / "theirs")
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
    same_as(found, expected)


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


def test_a_checkpoint_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StructureMismatch, match=r"no \.metadata"):
        read_dcp(tmp_path)
    state = {"a": torch.ones(100), "b": 1}
    dcp_directory.write(InMemory(state), open_store(tmp_path))
    same_as(read_dcp(tmp_path), state)
    metadata, file = tmp_path / ".metadata", tmp_path / "__0_0.distcp"
    described, raw = metadata.read_bytes(), file.read_bytes()
    file.write_bytes(raw[:-10])
    with pytest.raises(StructureMismatch, match=r"too short .*at 'b'"):
        read_dcp(tmp_path)
    file.write_bytes(raw)
    for damaged in (described[:-20], b"", b"\x80\x04N."):
        metadata.write_bytes(damaged)
        with pytest.raises(StructureMismatch, match=r"is damaged|another type"):
            read_dcp(tmp_path)
    metadata.write_bytes(described.replace(b"\x0c__0_0.distcp", b"\x0c../_0.distcp"))
    with pytest.raises(StructureMismatch, match="names no file of this directory"):
        read_dcp(tmp_path)
    metadata.write_bytes(described.replace(b"K\x64\x85", b"K\x63\x85", 1))
    with pytest.raises(StructureMismatch, match=r"parts of this tensor|another shape"):
        read_dcp(tmp_path)


# Hugging Face


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_from_pretrained_opens_what_is_exported(kind: str, tmp_path: Path) -> None:
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
    # What a training saves: fused, under a prefix, with an optimizer.
    state = {"model": model.state_dict(), "optimizer": {"x": torch.ones(1)}, "step": 3}
    rules = "keep model.**\nrename model.{rest...} -> {rest...}\n"
    if kind == "llama":
        made = mapped(state, rules + "join {x...}.{q,k,v}_proj.weight -> {x...}.qkv.weight\ntranspose lm_head.weight")
        state = {"model": made, "optimizer": {"x": torch.ones(1)}, "step": 3}
        rules += "split {x...}.qkv.weight -> {x...}.{q,k,v}_proj.weight\ntranspose lm_head.weight\n"
    whole = InMemory(state)
    for out, write in (
        ("bin", lambda store: torch_file.write(whole, store, read_rules(rules), name="pytorch_model.bin")),
        ("one", lambda store: safetensors_files.write(whole, store, read_rules(rules))),
        ("many", lambda store: safetensors_files.write(whole, store, read_rules(rules), shard_nbytes=2000)),
    ):
        (tmp_path / out).mkdir()
        written: Written = write(store := open_store(tmp_path / out))
        assert bool(written.ties) == (kind == "gpt2")
        copied = hugging_face.copy_config(tmp_path / "config", store)
        assert "config.json" in copied and "vocab.txt" in copied and "model.safetensors.index.json" not in copied
    assert len(list((tmp_path / "many").glob("model-*"))) > 2
    without_mlflash(tmp_path, """
        from transformers import AutoModelForCausalLM
        tokens, logits = torch.load("expected.pt")
        for out in ("bin", "one", "many"):
            model, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
            assert not any(report.values()), report
            assert torch.equal(model.eval()(tokens).logits, logits), out
    """)  # fmt: skip


def test_the_command_makes_a_directory_that_from_pretrained_opens(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=16, vocab_size=50)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.arange(12).view(2, 6)
    torch.save((tokens, model(tokens).logits.detach()), tmp_path / "expected.pt")
    config.save_pretrained(tmp_path / "config")
    (tmp_path / "rules").write_text("keep model.**\nrename model.{rest...} -> {rest...}\n")
    with Checkpointer(tmp_path / "drained", job="t", memory=str(tmp_path)) as ckpt:
        ckpt.save(7, {"model": model.state_dict(), "step": 7}).wait()
        ckpt.drain().wait()
    for form, more in (("torch", ["--flat"]), ("safetensors", ["--shard-size", "2kB"])):
        words = ["export", 7, tmp_path / form, "--to", form, "--directory", tmp_path / "drained", *more,
                 "--map", tmp_path / "rules", "--hf-config", tmp_path / "config", "--json"]  # fmt: skip
        told = CliRunner().invoke(main, [str(word) for word in words])
        assert told.exit_code == 0, told.output
        assert {"config.json", "generation_config.json"} & set(json.loads(told.stdout)["files"])
    without_mlflash(tmp_path, """
        from transformers import AutoModelForCausalLM
        tokens, logits = torch.load("expected.pt")
        for out in ("torch", "safetensors"):
            model, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
            assert not any(report.values()), report
            assert torch.equal(model.eval()(tokens).logits, logits), out
    """)  # fmt: skip


def test_a_directory_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no Hugging Face config\.json"):
        hugging_face.copy_config(tmp_path, open_store(tmp_path / "out"))
