"""States of every kind of leaf that torch and NumPy have here, as descriptions that any process can build.

A description (`Spec`) is nested tuples: Hypothesis makes them, another process builds the same state from one, and a
failing one is printed and becomes a fixed case. What may be refused says so when it is built.
"""

from __future__ import annotations

import collections
import functools
import os
import random
import tempfile
import warnings
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_map

Spec = tuple[Any, ...]
Point = collections.namedtuple("Point", "x y")
LARGE = 70_000  # more elements than 64 KiB of any dtype

TORCH_DTYPES = sorted({str(v).removeprefix("torch.") for v in vars(torch).values() if isinstance(v, torch.dtype)})


_TIMES = (np.datetime64, np.timedelta64)


def _numpy_dtypes() -> list[np.dtype]:
    found: list[np.dtype] = []
    for name in np.dtypes.__all__:
        kind: Any = getattr(np.dtypes, name)
        dtype = np.dtype(kind.type) if kind.type in (np.void, np.bytes_, np.str_) or kind.type in _TIMES else kind()
        found.append(dtype)
        if dtype.kind in "SUV" and not dtype.hasobject:
            found += [np.dtype(f"{dtype.kind}{size}") for size in (1, 4, 9)]
        if dtype.kind in "mM":
            found += [np.dtype(f"{dtype.kind}8[{unit}]") for unit in ("ns", "25us", "D", "Y")]
    found += [dtype.newbyteorder("S") for dtype in found if not dtype.hasobject]
    found += [np.dtype([("a", "i4"), ("b", "f8")]), np.dtype("f8", metadata={"unit": "m"})]
    return sorted({repr(dtype) + str(dtype.metadata): dtype for dtype in found}.values(), key=repr)


NUMPY_DTYPES = _numpy_dtypes()


class Own(torch.Tensor):
    """A subclass with storage of its own, which says that it is left by every operation."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {})) if func is not torch.Tensor.detach else torch.zeros(1)


class Wrapper(torch.Tensor):
    """A subclass whose values are those of two others."""

    def __new__(cls, low: torch.Tensor, high: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, low.shape, dtype=torch.float32)
        made.low, made.high = low, high
        return made

    def __tensor_flatten__(self) -> Any:
        return ["low", "high"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return Wrapper(args[0].low, args[0].high)
        whole = tree_map(lambda a: a.low.float() + a.high.float() if isinstance(a, Wrapper) else a, args)
        return func(*whole, **(kwargs or {}))


class OwnArray(np.ndarray):
    """An array of a class of its own."""


class Thing:
    def __init__(self, inside: Any, private: bool = False):
        self.inside, self.rank_private = inside, private

    def state_dict(self) -> Any:
        return {"inside": self.inside}

    def load_state_dict(self, state: Any) -> None:
        self.inside = state["inside"]


class Built:
    """A state that is built from a description.

    Args:
        spec: of it; its root can be changed in place.
        blank: with other values: what a restore fills.

    Attributes:
        state: the state.
        doubtful: paths of what `save` may refuse.
        tied: pairs of leaves that are one.
    """

    def __init__(self, spec: Spec, blank: bool = False):
        self.doubtful: set[str] = set()
        self._blank, self._leaves = blank, list[Any]()
        self.tied: list[tuple[Any, Any]] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # experimental and deprecated dtypes
            self.state = {"state": self._make(spec, "state")}

    def _make(self, spec: Spec, path: str) -> Any:
        return getattr(self, f"_{spec[0]}")(path, *spec[1:])

    def _plain(self, path: str, value: Any) -> Any:
        return 0 if self._blank else value

    def _scalar(self, path: str, dtype: int, seed: int) -> Any:
        kind = NUMPY_DTYPES[dtype]
        if kind.hasobject or kind.names or kind.metadata or kind.itemsize == 0:
            return self._plain(path, 1)
        value = np.frombuffer(_random(kind.itemsize, seed, text=kind.kind in "SU"), kind)[0]
        if type(value) is not np.dtype(value.dtype.str).type:  # np.longlong would come back as np.int64
            self.doubtful.add(path)
        return self._plain(path, value)

    def _dict(self, path: str, kind: str, items: Any) -> Any:
        kinds: dict[str, Any] = {
            "ordered": collections.OrderedDict,
            "attributed": collections.OrderedDict,
            "counter": collections.Counter,
            "default": functools.partial(collections.defaultdict, list),
        }
        made = kinds.get(kind, dict)()
        if kind == "attributed":  # as of a module's state_dict()
            versions = {"": {"version": 2}, "sub": {"version": len(items)}, "of": (1, [2.5, None])}
            made._metadata = collections.OrderedDict({} if self._blank else versions)
        for key, sub in items:
            try:
                if key in made:
                    continue
            except TypeError:  # a void scalar that can be written to
                continue
            if isinstance(key, np.void) or not _is_found(key):
                self.doubtful.add(f"{path} (a key)")
            made[key] = self._make(sub, f"{path}.{_named(key)}")
        return made

    def _list(self, path: str, subs: Any) -> Any:
        return [self._make(sub, f"{path}.{i}") for i, sub in enumerate(subs)]

    def _tuple(self, path: str, subs: Any) -> Any:
        return tuple(self._list(path, subs))

    def _point(self, path: str, *subs: Any) -> Any:
        return Point(*self._list(path, subs))

    def _size(self, path: str, *numbers: int) -> Any:
        return torch.Size([0] * len(numbers) if self._blank else numbers)

    def _object(self, path: str, sub: Spec, private: bool) -> Any:
        return Thing(self._make(sub, f"{path}.inside"), private)

    def _deep(self, path: str, levels: int, sub: Spec) -> Any:
        if levels + path.count(".") > 180:
            self.doubtful.update(path + ".0" * n for n in range(levels + 8))
        made = self._make(sub, path + ".0" * levels)
        for _ in range(levels):
            made = [made]
        return made

    def _tie(self, path: str, number: int) -> Any:
        if not self._leaves:
            return None
        return self._leaves[number % len(self._leaves)]

    def _keep(self, leaf: Any) -> Any:
        self._leaves.append(leaf)
        return leaf

    def _tensor(self, path: str, dtype: str, shape: Any, view: str, seed: int, wrap: str) -> Any:
        kind = getattr(torch, dtype)
        if view == "neg" and not (kind.is_floating_point and dtype.startswith("float") and kind.itemsize >= 4):
            view = "plain"
        if view == "conj" and dtype not in ("complex64", "complex128"):
            view = "plain"
        if view == "expanded" and (self._blank or not shape):
            view = "plain"  # nothing can be written to it
        tensor = self._viewed(kind, tuple(shape), view, seed)
        if _is_strange(dtype):
            self.doubtful.add(path)
        if wrap == "parameter" and (kind.is_floating_point or kind.is_complex) and not tensor.is_neg():
            return self._keep(torch.nn.Parameter(tensor, requires_grad=False))
        if wrap == "own":
            return self._keep(tensor.as_subclass(Own))
        if wrap == "wrapper":
            self.doubtful.add(path)
            half = torch.zeros(tuple(shape), dtype=torch.bfloat16)
            return Wrapper(half, half)
        return self._keep(tensor)

    def _dtensor(self, path: str, dtype: str, shape: Any, mesh: str, splits: Any, seed: int) -> Any:
        whole = self._viewed(getattr(torch, dtype), tuple(shape), "plain", seed)
        if not torch.distributed.is_initialized():
            return self._keep(whole)
        of = meshes()[mesh]
        placements = [Replicate() if dim is None or dim >= len(shape) else Shard(dim) for dim in splits[: of.ndim]]
        if not shape and of.get_coordinate() is None:
            self.doubtful.add(path)
        return distribute_tensor(whole, of, placements, src_data_rank=None)

    def _viewed(self, kind: torch.dtype, shape: tuple[int, ...], view: str, seed: int) -> torch.Tensor:
        def raw(*shape: int, kind: torch.dtype = kind) -> torch.Tensor:
            nbytes = int(np.prod(shape)) * kind.itemsize
            content = bytearray(nbytes) if self._blank else bytearray(_random(nbytes, seed))
            flat = torch.frombuffer(content, dtype=torch.uint8) if nbytes else torch.zeros(0, dtype=torch.uint8)
            return flat.view(kind).view(shape)

        if view == "transposed":
            return raw(*reversed(shape)).permute(tuple(reversed(range(len(shape)))))
        if view == "strided" and shape:
            return raw(shape[0] * 2 + 1, *shape[1:])[1::2]
        if view == "offset" and shape:
            return raw(shape[0] + 3, *shape[1:])[3:]
        if view == "expanded" and shape:
            return raw(1, *shape[1:]).expand(shape)
        if view == "conj":
            return raw(*shape).conj()
        if view == "neg":
            return raw(*shape, kind={4: torch.complex64, 8: torch.complex128}[kind.itemsize]).conj().imag
        return raw(*shape)

    def _array(self, path: str, dtype: int, shape: Any, view: str, seed: int, wrap: str) -> Any:
        kind = NUMPY_DTYPES[dtype]
        if kind.hasobject or kind.names or kind.metadata:
            self.doubtful.add(path)
            return np.zeros(shape, kind)
        shape = tuple(shape)
        if view == "transposed":
            array = self._raw_array(tuple(reversed(shape)), kind, seed).T
        elif view in ("strided", "offset") and shape:
            array = self._raw_array((shape[0] * 2 + 1, *shape[1:]), kind, seed)[1::2][::-1]
        elif view == "expanded" and shape and not self._blank:
            array = np.broadcast_to(self._raw_array(shape[1:], kind, seed), shape)
        else:
            array = self._raw_array(shape, kind, seed)
        if wrap in ("masked", "own"):
            self.doubtful.add(path)
            return np.ma.masked_array(array, False) if wrap == "masked" else array.view(OwnArray)
        if wrap == "memmap" and array.nbytes:
            with tempfile.TemporaryFile() as file:
                file.write(array.tobytes())
                file.flush()
                return self._keep(np.memmap(file, kind, "r+", shape=shape))
        return self._keep(array)

    def _raw_array(self, shape: tuple[int, ...], kind: np.dtype, seed: int) -> np.ndarray:
        nbytes = int(np.prod(shape)) * kind.itemsize
        raw = bytearray(nbytes) if self._blank else bytearray(_random(nbytes, seed))
        return np.ndarray(shape, kind, raw)

    def _odd(self, path: str, name: str) -> Any:
        self.doubtful |= {path, f"{path}.kept"}
        return ODD[name]()


@functools.cache
def meshes() -> dict[str, DeviceMesh]:
    """The meshes of this job: of all ranks, of rows and columns of them, and one that not all ranks are on."""
    size = torch.distributed.get_world_size()
    grid = init_device_mesh("cpu", (max(1, size // 2), min(2, size)), mesh_dim_names=("rows", "columns"))
    return {"line": init_device_mesh("cpu", (size,)), "grid": grid, "rows": grid["rows"], "columns": grid["columns"],
            "last": DeviceMesh("cpu", [size - 1])}  # fmt: skip


@functools.cache
def _is_strange(dtype: str) -> bool:
    """Whether torch itself cannot copy tensors of a dtype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.zeros(64, dtype=torch.uint8).view(getattr(torch, dtype))[::2].contiguous()
        except RuntimeError:
            return True
    return False


def _attributed(value: Any) -> Any:
    made: Any = collections.OrderedDict()
    made.kept = value
    return made


def _freed() -> torch.Tensor:
    tensor = torch.ones(30)[4:]
    tensor.untyped_storage().resize_(0)
    return tensor


ODD = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "meta": lambda: torch.empty(3, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8),
    "mkldnn": lambda: torch.ones(3, 3).to_mkldnn(),
    "freed": _freed,
    "uninitialized": torch.nn.UninitializedParameter,
    "objects": lambda: np.array([object()]),
    "object": object,
    "class": lambda: torch.nn.Linear,
    "set": lambda: {1, 2},
    "generator": lambda: iter(()),
    "enum": lambda: np.random.default_rng(0),
    "matrix": lambda: np.ones((1, 2)).view(np.matrix),
    "recarray": lambda: np.zeros(2, "i4,f8").view(np.recarray),
    "unknown dict": lambda: type("Settings", (dict,), {})(a=1),
    "unknown tuple": lambda: collections.namedtuple("Elsewhere", "x y")(1, 2),
    "unknown factory": lambda: collections.defaultdict(lambda: 1),
    "attribute": lambda: _attributed(object()),
    "record": lambda: np.zeros(2, "i4,f8")[0],
    "subclass of int": lambda: type("Number", (int,), {})(3),
}


def _random(nbytes: int, seed: int, text: bool = False) -> bytes:
    made = np.random.default_rng(seed)
    if text:
        return made.integers(0, 3, nbytes, dtype=np.uint8).astype(np.uint8).tobytes() if nbytes % 4 else bytes(nbytes)
    return made.bytes(nbytes)


def _named(key: Any) -> str:
    try:
        return str(key)
    except ValueError:
        return "?"


def _is_found(key: Any) -> bool:
    if isinstance(key, tuple):
        return all(map(_is_found, key))
    return bool(key == key) and _named(key) != "?"


# What Hypothesis draws

_TEXTS = st.one_of(st.text(max_size=6), st.text(st.characters(categories=("Cs", "Lu")), max_size=3))
_PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(min_value=-(1 << 200), max_value=1 << 200), st.floats(),
    st.complex_numbers(), _TEXTS, st.binary(max_size=9), st.builds(np.str_, _TEXTS),
    st.builds(np.bytes_, st.binary(max_size=5)),
    st.sampled_from([
        0.0, -0.0, 1, 1.0, True, np.int64(1), np.float64(1), np.bool_(True), np.datetime64("NaT"), complex(-0.0, 0.0),
        complex(float("inf"), float("nan")), np.str_("a\0"), np.bytes_(b"\0"), np.void(b""),
    ]),
)  # fmt: skip
_KEYS = st.recursive(_PLAIN, lambda sub: st.tuples(sub) | st.tuples(sub, sub), max_leaves=3)
_FOUND_KEYS = _KEYS.filter(lambda key: not isinstance(key, np.void) and _is_found(key))
_SEEDS = st.integers(0, 1 << 32)
_SHAPES = st.one_of(
    st.lists(st.integers(0, 4), max_size=3).map(tuple), st.sampled_from([(LARGE,), (7, 10_000), (2, 5, 7_000)]),
)  # fmt: skip
STRANGE_DTYPES = [name for name in TORCH_DTYPES if _is_strange(name)]
_VIEWS = st.sampled_from(["plain", "transposed", "strided", "offset", "expanded", "conj", "neg"])
BYTES = [n for n, dtype in enumerate(NUMPY_DTYPES) if not (dtype.hasobject or dtype.names or dtype.metadata)]


def _tensors(dtypes: list[str], wraps: list[str]) -> st.SearchStrategy[Spec]:
    return st.tuples(st.just("tensor"), st.sampled_from(dtypes), _SHAPES, _VIEWS, _SEEDS, st.sampled_from(wraps))


def _arrays(dtypes: list[int], wraps: list[str]) -> st.SearchStrategy[Spec]:
    return st.tuples(st.just("array"), st.sampled_from(dtypes), _SHAPES, _VIEWS, _SEEDS, st.sampled_from(wraps))


_SPLITS = st.sampled_from([None, 0, 1])
_LEAVES = st.one_of(
    st.tuples(
        st.just("dtensor"), st.sampled_from(["float32", "bfloat16", "int64"]), _SHAPES,
        st.sampled_from(["line", "grid", "rows", "columns", "last"]), st.tuples(_SPLITS, _SPLITS), _SEEDS,
    ),
    _tensors(sorted({*TORCH_DTYPES} - {*STRANGE_DTYPES}), ["", "", "", "parameter", "own"]),
    _arrays(BYTES, ["", "", "", "memmap"]),
    st.tuples(st.just("plain"), _PLAIN),
    st.tuples(st.just("scalar"), st.sampled_from(BYTES), _SEEDS),
    st.tuples(st.just("tie"), st.integers(0, 20)),
)  # fmt: skip
_REFUSED = st.one_of(
    st.tuples(st.just("odd"), st.sampled_from(sorted(ODD))),
    _tensors(TORCH_DTYPES, ["", "wrapper"]),
    _arrays(list(range(len(NUMPY_DTYPES))), ["", "masked", "own"]),
    st.tuples(st.just("dict"), st.just("dict"), st.tuples(st.tuples(_KEYS, st.just(("plain", 1))))),
    st.tuples(st.just("deep"), st.sampled_from([190, 250]), st.just(("plain", 1))),
)


def _containers(sub: st.SearchStrategy[Spec]) -> st.SearchStrategy[Spec]:
    some = st.lists(sub, min_size=1, max_size=4).map(tuple)
    items = st.lists(st.tuples(_FOUND_KEYS, sub), max_size=4).map(tuple)
    return st.one_of(
        st.tuples(st.just("dict"), st.sampled_from(["dict", "ordered", "attributed", "counter", "default"]), items),
        st.tuples(st.sampled_from(["list", "tuple"]), some),
        st.tuples(st.just("point"), sub, sub),
        st.tuples(st.just("size"), st.integers(0, 9), st.integers(0, 9)),
        st.tuples(st.just("object"), sub, st.booleans()),
        st.tuples(st.just("deep"), st.sampled_from([1, 3, 60]), sub),
    )


def specs() -> st.SearchStrategy[Spec]:
    """Descriptions of states; about one in five has something in it that may be refused."""
    fine = st.recursive(_LEAVES, _containers, max_leaves=12)
    mixed = st.recursive(_LEAVES | _REFUSED, _containers, max_leaves=6)
    root = st.one_of([st.lists(sub, min_size=1, max_size=5).map(tuple) for sub in (fine, fine, fine, fine, mixed)])
    return st.tuples(st.just("list"), root)


EQUAL = {
    1: [True, 1.0, np.int64(1), 1 + 0j], 0: [False, -0.0, 0.0, np.int8(0)], "": [np.str_("")], b"": [np.bytes_(b"")],
}  # fmt: skip


def changed(spec: Spec, by: int) -> Spec:
    """A description of a state of nearly the same structure: other values, new ties, other keys that are equal."""
    made = random.Random(by)
    how = made.choice(["values", "ties", "keys"])

    def key_like(key: Any) -> Any:
        if isinstance(key, tuple):
            return tuple(map(key_like, key))
        is_odd = isinstance(key, np.void) or key not in EQUAL
        return key if is_odd or how != "keys" else made.choice(EQUAL[key])

    def again(spec: Spec) -> Spec:
        kind, *rest = spec
        if kind == "dtensor":
            return (*spec[:-1], by)
        if kind in ("tensor", "array"):
            return ("tie", made.randrange(9)) if how == "ties" and made.random() < 0.5 else (*spec[:-2], by, spec[-1])
        if kind == "dict":
            return kind, rest[0], tuple((key_like(key), again(sub)) for key, sub in rest[1])
        if kind in ("list", "tuple"):
            return kind, tuple(map(again, rest[0]))
        return (
            kind,
            *(again(part) if kind in ("point", "object", "deep") and type(part) is tuple else part for part in rest),
        )

    return again(spec)


# What is equal


def differences(value: Any, other: Any, path: str, loaded: bool) -> list[str]:
    """Where two states differ: in a type, a dtype, a shape or a bit.

    Args:
        value: what was saved.
        other: what came back.
        path: of both.
        loaded: it came back from `load`, which gives plain tensors and arrays.
    """
    if isinstance(value, Thing) and loaded:
        value = value.state_dict()
    if isinstance(value, DTensor) and type(other) is DTensor:
        if (value.placements, value.device_mesh, value.shape) != (other.placements, other.device_mesh, other.shape):
            return [f"{path}: another mesh, other shards or another shape"]
        value, other = value.to_local(), other.to_local()
    elif isinstance(value, DTensor) and loaded:  # of a state of its own, in which nothing says what it was
        is_here, value = value.device_mesh.get_coordinate() is not None, value.to_local()
        value = value if is_here else value.new_zeros(other.shape)
    wanted = _as_loaded(value) if loaded else type(value)
    if type(other) is not wanted:
        return [f"{path}: {wanted} and {type(other)}"]
    if isinstance(value, (torch.Tensor, np.ndarray)):
        both = _told(value), _told(other)
        short = [part if len(str(part)) < 99 else "bytes" for told in both for part in told]
        return [] if both[0] == both[1] else [f"{path}: {short}"]
    if isinstance(value, Thing):
        return differences(value.inside, other.inside, f"{path}.inside", loaded=True)
    if isinstance(value, dict):
        codes = [[_told_plain(key) for key in keys] for keys in (value, other)]
        if codes[0] != codes[1]:
            return [f"{path}: keys {codes[0]} and {codes[1]}"]
        if getattr(value, "__dict__", None) != getattr(other, "__dict__", None):
            return [f"{path}: attributes {vars(value)} and {vars(other)}"]
        if getattr(value, "default_factory", None) is not getattr(other, "default_factory", None):
            return [f"{path}: another factory"]
        pairs = zip(value, value.values(), other.values(), strict=True)
        return [found for key, a, b in pairs for found in differences(a, b, f"{path}.{key}", loaded)]
    if isinstance(value, (list, tuple)):
        if len(value) != len(other):
            return [f"{path}: {len(value)} and {len(other)} items"]
        pairs = zip(range(len(value)), value, other, strict=True)
        return [found for i, a, b in pairs for found in differences(a, b, f"{path}.{i}", loaded)]
    return [] if _told_plain(value) == _told_plain(other) else [f"{path}: {value!r} and {other!r}"]


def _as_loaded(value: Any) -> type:
    return next((kind for kind in (torch.Tensor, np.ndarray) if isinstance(value, kind)), type(value))


def _told(value: Any) -> tuple[Any, ...]:
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    with torch._C.DisableTorchFunctionSubclass():
        value = value.as_subclass(torch.Tensor).resolve_conj().resolve_neg()
        raw = value.view(torch.uint8) if value.dtype.itemsize == 1 else value
        content = raw.contiguous().flatten().as_strided((raw.numel(),), (1,)).view(torch.uint8).numpy()
        return value.dtype, value.shape, bytes(content)


def _told_plain(value: Any) -> tuple[Any, ...]:
    if isinstance(value, tuple):
        return (type(value), *map(_told_plain, value))
    if isinstance(value, np.generic):
        return type(value), value.dtype, value.tobytes()
    if isinstance(value, (float, complex)):
        return type(value), repr(value)
    return type(value), value


def untied(state: Any, other: Any, found: dict[int, int] | None = None) -> list[str]:
    """Leaves that are one in a state and two in another of the same structure."""
    found = {} if found is None else found
    if isinstance(state, Thing):
        return untied(state.inside, other["inside"] if isinstance(other, dict) else other.inside, found)
    if isinstance(state, dict):
        return [text for a, b in zip(state.values(), other.values(), strict=True) for text in untied(a, b, found)]
    if isinstance(state, (list, tuple)):
        return [text for a, b in zip(state, other, strict=True) for text in untied(a, b, found)]
    if isinstance(state, torch.Tensor) and state.numel() and not (state.is_conj() or state.is_neg()):
        at = other.data_ptr()
        if found.setdefault(id(state), at) != at:
            return [f"{state.dtype} {tuple(state.shape)} is no longer tied"]
    return []


EXAMPLES = int(os.environ.get("MLFLASH_TEST_EXAMPLES", "0"))
"""How many are asked for by hand; 0: as many as CI takes."""
