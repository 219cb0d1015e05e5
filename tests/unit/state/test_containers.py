"""Classes of containers: what comes back, what is refused, and that reading makes nothing else."""

from __future__ import annotations

import collections
import sys
import types
from typing import Any

import pytest
import torch
from unit.stored import Store

from mlflash import errors
from mlflash.state.flatten import flatten
from mlflash.state.manifest import BAD_DOCUMENT, check_tree
from mlflash.state.paths import plain_leaves, unique
from mlflash.state.rebuild import compare

Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("saved", "live", "is_fine"),
    [
        ({}, collections.OrderedDict(), True), (collections.OrderedDict(), {}, True),
        ((1, 2), torch.Size([1, 2]), True),
        (collections.Counter(), {}, False), ({}, collections.Counter(), False), (Point(1, 2), (1, 2), False),
        ((1, 2), Point(1, 2), False), (collections.defaultdict(int), collections.defaultdict(list), False),
    ],
)  # fmt: skip
def test_a_live_container_of_another_class_is_another_structure(saved: Any, live: Any, is_fine: bool) -> None:
    flat = flatten({"c": saved})
    differences = compare({"c": live}, flat.structure.tree, flat.structure.entries)
    assert (differences == []) is is_fine and all(difference.startswith("c: ") for difference in differences)


def test_a_named_tuple_whose_class_is_gone_or_changed_is_not_made(node_memory: Any, monkeypatch: Any) -> None:
    store, module = Store(node_memory), types.ModuleType("elsewhere")
    monkeypatch.setitem(sys.modules, "elsewhere", module)
    module.Pair = collections.namedtuple("Pair", "a b", module="elsewhere")  # type: ignore[attr-defined]
    store.write({"pair": module.Pair(1, torch.ones(2))})
    assert type(store.load()["pair"]) is module.Pair
    made = []
    evil = type("Pair", (tuple,), {"_fields": ("a", "b"), "__new__": lambda *a: made.append(a)})
    for other in (collections.namedtuple("Pair", "a c"), evil, print, None):
        module.Pair = other  # type: ignore[attr-defined]
        if other is evil:  # only the class is looked at; none of its code runs
            assert type(store.load()["pair"]) is evil and made == []
        else:
            with pytest.raises(errors.StructureMismatch, match=r"import it first[^Z]*elsewhere.Pair"):
                store.load()


@pytest.mark.parametrize(
    "node",
    [
        ["k", ["d", []], ["os"], None], ["k", ["d", []], ["defaultdict", "eval"], None], ["k", ["d", []], [], None],
        ["k", ["d", []], ["Size"], None], ["k", ["t", []], ["Counter"], None], ["k", ["l", []], ["OrderedDict"], None],
        ["k", ["d", []], ["OrderedDict"], ["v", 1]], ["k", ["d", []], ["Counter"], ["d", []]], ["k", ["d", []]],
        ["k", ["d", []], ["OrderedDict"], ["d", [[1, ["v", 1]]]]], ["k", ["d", []], "OrderedDict", None],
        ["k", ["d", []], ["OrderedDict"], ["d", [["a", ["x", 1]]]]], ["k", ["t", []], ["namedtuple", "os"], None],
        ["k", ["k", ["d", []], ["Counter"], None], ["OrderedDict"], None],
    ],
)  # fmt: skip
def test_hostile_containers_are_refused(node: Any) -> None:
    with pytest.raises(BAD_DOCUMENT):
        check_tree(["d", [["a", node]]], 0, 0)


def test_paths_that_read_alike_are_told_apart_in_any_order() -> None:
    for state in ({"a": {"b": 1}, "a.b": 2, 1: 3, "1": 4}, {"1": 4, 1: 3, "a.b": 2, "a": {"b": 1}}):
        flat = flatten(state)
        by_path = {path: flat.plain[number] for path, number in plain_leaves(flat.structure.tree).items()}
        assert by_path == {"'a'.'b'": 1, "'a.b'": 2, "1": 3, "'1'": 4}
    assert unique([("a", "x"), ("b", "a"), ("a", "y")]) == ["x", "b", "y"]
    with pytest.raises(errors.StateError, match="two leaves have one path"):
        unique([("a", "x"), ("a", "x")])
