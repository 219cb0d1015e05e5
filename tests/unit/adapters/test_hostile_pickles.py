"""Hostile pickles: what a checkpoint that somebody else has written could try, all of it refused, none of it done."""

from __future__ import annotations

import argparse
import pathlib
import pickle
import sys
import threading
from typing import Any

import pytest
import torch

from mlflash.adapters import known, pickles
from mlflash.adapters.pickles import load
from mlflash.errors import CorruptSlot


class Pickle:
    """Writes a hostile pickle, opcode by opcode."""

    def __init__(self) -> None:
        self.raw = pickle.PROTO + bytes([4])

    def name(self, module: str, name: str) -> Pickle:
        for word in (module, name):
            self.raw += pickle.BINUNICODE + len(word.encode()).to_bytes(4, "little") + word.encode()
        self.raw += pickle.STACK_GLOBAL
        return self

    def value(self, value: Any) -> Pickle:
        self.raw += _opcodes(value)
        return self

    def do(self, *opcodes: bytes) -> bytes:
        return self.raw + b"".join(opcodes) + pickle.STOP


def _opcodes(value: Any) -> bytes:
    """A plain value as opcodes without a memo."""
    if isinstance(value, tuple):
        return pickle.MARK + b"".join(map(_opcodes, value)) + pickle.TUPLE
    if isinstance(value, dict):
        pairs = b"".join(_opcodes(part) for pair in value.items() for part in pair)
        return pickle.EMPTY_DICT + pickle.MARK + pairs + pickle.SETITEMS
    if isinstance(value, Named):
        return Pickle().name(value.module, value.name).raw[2:]
    return pickle.dumps(value, 0)[:-1].partition(b"p0\n")[0]


class Named:
    """What a hostile pickle names in the place of a value."""

    def __init__(self, module: str, name: str):
        self.module, self.name = module, name


def called(module: str, name: str, *arguments: Any) -> bytes:
    return Pickle().name(module, name).value(arguments).do(pickle.REDUCE)


def changed(module: str, name: str, state: Any) -> bytes:
    """Set attributes of what is named, and not of an object made of it."""
    return Pickle().name(module, name).value(state).do(pickle.BUILD)


def made(module: str, name: str, arguments: tuple[Any, ...], state: Any = None) -> bytes:
    rest = (_opcodes(state), pickle.BUILD) if state is not None else ()
    return Pickle().name(module, name).value(arguments).do(pickle.NEWOBJ, *rest)


SYSTEM = Named("os", "system")
HOSTILE = {
    "the original": lambda path: called("mlflash.telemetry.metrics", "Metrics", path, Named("builtins", "dict")),
    "a command": lambda path: called("os", "system", f"touch {path}"),
    "a dtype with objects": lambda path: called("mlflash.adapters.known", "numpy_dtype", "O,i4"),
    "a dtype of objects": lambda path: called("mlflash.adapters.known", "numpy_dtype", "|O"),
    "objects of bytes": lambda path: called("mlflash.adapters.known", "numpy_array", "|O", (1,), b"A" * 8),
    "an array beyond its bytes": lambda path: called("mlflash.adapters.known", "numpy_array", "<f8", (9,), b"A" * 8),
    "a module of torch": lambda path: called("mlflash.adapters.known", "of_torch", "hub"),
    "by way of a module": lambda path: called("mlflash.adapters.known", "np.load", path),
    "by way of a known class": lambda path: called("argparse", "Namespace.__init__.__globals__", path),
    "a value called": lambda path: called("builtins", "str", b"x", "idna"),
    "data called": lambda path: called("argparse", "Namespace", 1),
    "data with arguments": lambda path: made("argparse", "Namespace", (1,)),
    "a member by more than its value": lambda path: called("signal", "Signals", "Other", ("A",)),
    "an attribute of a class": lambda path: changed("argparse", "Namespace", (None, {"__init__": 1})),
    "an attribute of a class, plain": lambda path: changed("argparse", "Namespace", (None, {"seen": path})),
    "an attribute of a function": lambda path: changed("mlflash.adapters.known", "parameter", {"seen": path}),
    "another class": lambda path: made("argparse", "Namespace", (), (None, {"__class__": Named("numpy", "ndarray")})),
    "an attribute of Python": lambda path: made("argparse", "Namespace", (), {"__del__": path}),
    "attributes that are none": lambda path: made("argparse", "Namespace", (), ((1, 2), {})),
    "a tensor's class": lambda path: called("mlflash.adapters.pickles", "_rebuild", SYSTEM, {}, path, (), (), False),
    "a known class for a tensor's": lambda path: called(
        "mlflash.adapters.pickles", "_rebuild", Named("collections", "OrderedDict"), {}, path, (), (), False),
    "old opcodes": lambda path: b"(S'touch x'\nios\nsystem\n.",
    "old opcodes of objects": lambda path: b"(cos\nsystem\nS'touch x'\no.",
    "a registered number": lambda path: b"\x80\x04\x82\x01.",
    "a persistent name": lambda path: b"\x80\x04Pos\n.",
    "keywords": lambda path: Pickle().name("argparse", "Namespace").value(()).value({"a": 1}).do(pickle.NEWOBJ_EX),
    "filling what is none": lambda path: Pickle().name("argparse", "Namespace").value(()).do(
        pickle.NEWOBJ, pickle.MARK, _opcodes(1), pickle.APPENDS),
}  # fmt: skip


@pytest.mark.parametrize("which", HOSTILE)
def test_a_hostile_pickle_is_refused_and_nothing_is_done(
    which: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    canary = tmp_path / "canary"
    canary.write_text("untouched")
    before = {**vars(argparse.Namespace)}, set(known.CALLED), set(pickles._allowed)
    threads = threading.enumerate()
    with pytest.raises(CorruptSlot):
        load(HOSTILE[which](str(canary)), [torch.ones(2)])
    assert [path.name for path in tmp_path.iterdir()] == ["canary"] and canary.read_text() == "untouched"
    assert ({**vars(argparse.Namespace)}, set(known.CALLED), set(pickles._allowed)) == before
    assert not hasattr(known.parameter, "seen") and threading.enumerate() == threads


def names_of_loaded_modules() -> list[tuple[str, str]]:
    """What can be called in all modules that are loaded, but for what pickles may name."""
    tables = (known.DATA, known.ENUMS, known.VALUES)
    may = {
        *known.CALLED,
        *known.METHODS,
        *((module, name) for table in tables for module in table for name in table[module]),
    }
    found = {(module, name) for module, loaded in [*sys.modules.items()] if loaded is not None
             for name, value in [*vars(loaded).items()] if callable(value)}  # fmt: skip
    return sorted(found - may - {(pickles.__name__, "_rebuild")})


def test_nothing_else_of_any_loaded_module_is_called_made_or_changed() -> None:
    names = names_of_loaded_modules()
    assert {("builtins", "eval"), ("os", "system"), ("torch", "load"), ("numpy", "memmap")} <= {*names}
    for module, name in names:
        for raw in (called(module, name, "x"), made(module, name, ()), changed(module, name, (None, {"seen": 1}))):
            with pytest.raises(CorruptSlot):
                load(raw, [])
