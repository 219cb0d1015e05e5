"""What a replay compares and sends: signatures of gradients, and micro-batches as bytes; on one rank."""

from __future__ import annotations

import collections
import math
from typing import Any

import pytest
import torch
from torch import nn

from mlflash.adapters.replay import Place
from mlflash.adapters.replay.gradients import Signature, difference, sign
from mlflash.adapters.replay.replay import judge, pack, unpack

BASE = torch.arange(2000.0)
TENSORS = {
    "a view": BASE[5:17], "rows": BASE.view(40, 50)[3:5], "columns": BASE.view(40, 50)[:, 7:9],
    "transposed": BASE[:12].view(3, 4).T, "expanded": BASE[3:4].expand(5, 2), "empty": torch.empty(0, 3),
    "none of a row": torch.empty(2, 0), "one number": torch.tensor(3), "channels last":
    torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), "bool": torch.tensor([True, False]),
    "complex": torch.randn(3, dtype=torch.complex64), "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "bfloat16": torch.randn(7).bfloat16(), "float8": torch.randn(8).to(torch.float8_e4m3fn),
    "not a number": torch.tensor([math.nan, math.inf, -0.0]), "wants a gradient": torch.randn(3).requires_grad_(),
}  # fmt: skip


@pytest.mark.parametrize("name", [*TENSORS])
def test_a_tensor_comes_as_it_is_and_little_of_its_storage_besides(name: str) -> None:
    tensor = TENSORS[name]
    packed = pack(tensor)
    found = unpack(packed)
    assert len(packed) < 1000 or (name == "columns" and len(packed) < 8000)
    assert (found.shape, found.stride(), found.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert found.requires_grad == tensor.requires_grad
    one, other = (each.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for each in (tensor, found))
    assert torch.equal(one, other)


def test_any_structure_is_sent_and_what_pickle_refuses_is_not() -> None:
    kind = collections.namedtuple("kind", "x y")
    globals()["kind"] = kind
    kind.__module__ = __name__
    batch: dict[str, Any] = {"a": [kind(BASE[:2], {"z": None})], 3: ("text", {1, 2}, nn.Parameter(torch.ones(2)))}
    found = unpack(pack(batch))
    assert found["a"][0].x.tolist() == [0.0, 1.0] and found["a"][0].y == {"z": None}
    assert found[3][:2] == ("text", {1, 2}) and type(found[3][2]) is nn.Parameter
    with pytest.raises(TypeError, match="generator"):
        pack(one for one in [1])


GRADIENTS = {
    "small": torch.linspace(-1, 1, 50), "large": torch.linspace(-1, 1, 5000), "one": torch.tensor(2.0),
    "matrix": torch.randn(70, 30).T, "bfloat16": torch.linspace(-1, 1, 3000).bfloat16(),
    "complex": torch.randn(20, dtype=torch.complex64), "sparse": torch.eye(4).to_sparse(), "empty": torch.empty(0, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", [*GRADIENTS])
def test_the_same_bits_have_the_same_signature(name: str) -> None:
    one, other = sign(GRADIENTS[name]), sign(GRADIENTS[name].clone())
    assert one.digest == other.digest and difference(one, other) == 0.0
    assert (one.sums == other.sums).all() and one.sums.size <= 1024


@pytest.mark.parametrize("name", ["small", "large", "one", "bfloat16"])
@pytest.mark.parametrize("bit", [0, 5, 14])
def test_any_flipped_bit_is_other_bits(name: str, bit: int) -> None:
    gradient = GRADIENTS[name]
    for place in {0, gradient.numel() // 3, gradient.numel() - 1}:
        other = gradient.reshape(-1).clone()
        other.view({2: torch.int16, 4: torch.int32}[gradient.itemsize])[place] ^= 1 << bit
        assert sign(gradient).digest != sign(other.view_as(gradient)).digest


def test_how_far_two_gradients_are_is_relative_to_the_largest_element() -> None:
    small = GRADIENTS["small"]
    other = small.clone()
    other[7] += 0.01
    assert difference(sign(small), sign(other)) == pytest.approx(0.01)
    assert difference(sign(1e6 * small), sign(1e6 * other)) == pytest.approx(0.01)
    large = GRADIENTS["large"]  # 5 elements in a sum
    other = large.clone()
    other[2000] += 0.01
    assert difference(sign(large), sign(other)) == pytest.approx(0.01 / math.sqrt(5))
    noisy = large + 1e-3 * torch.randn(5000, generator=torch.Generator().manual_seed(0))
    assert 1e-3 < difference(sign(large), sign(noisy)) < 6e-3


def test_what_is_no_number_in_one_of_them_only_is_infinitely_far() -> None:
    small = GRADIENTS["small"]
    for value in (math.nan, math.inf, -math.inf):
        other = small.clone()
        other[3] = value
        assert difference(sign(small), sign(other)) == math.inf
        both = small.clone()
        both[3], both[4] = value, -1.0
        assert difference(sign(other), sign(both)) in (0.0, math.inf) and difference(sign(other), sign(other)) == 0.0
    assert difference(sign(small), sign(small[:9])) == math.inf
    assert difference(sign(torch.zeros(3)), sign(torch.tensor([0.0, -0.0, 0.0]))) == 0.0


# Verdicts

A, B, C = (Place(number, f"n{number}", "cpu") for number in range(3))


def passes(text: str) -> list[dict[str, Signature]]:
    """Of the subject, the first witness, the second one, the subject again: equal letters are equal bits."""
    return [{"w": sign(torch.tensor(float(ord(letter))))} for letter in text]


@pytest.mark.parametrize(("text", "witnesses", "culprit"), [
    ("abaa", (B, C), B), ("abbb", (B, C), A), ("abba", (B, C), A), ("abbc", (B, C), A), ("abab", (B, C), B),
    ("abca", (B, C), None), ("abcd", (B, C), None), ("abcb", (B, C), None), ("abcc", (B, C), None),
    ("abba", (B, B), None), ("abaa", (B, B), B), ("abca", (B, B), B), ("abbb", (B, B), A), ("abbc", (B, B), A),
    ("abcd", (B, B), None), ("abab", (B, B), None), ("abbb", (A, A), A),
])  # fmt: skip
def test_the_majority_of_three_ranks_says_who_is_wrong_and_of_two_the_one_that_differs_from_itself(
    text: str, witnesses: tuple[Place, Place], culprit: Place | None
) -> None:
    found, reason = judge(passes(text), A, witnesses, 0.0)
    assert found == culprit and reason
