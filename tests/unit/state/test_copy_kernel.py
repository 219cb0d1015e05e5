"""Copies past the caches: the bytes of memcpy and the checksums of xxhash, whatever the sizes and places."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from mlflash.state import copy_kernel
from mlflash.state.copy_kernel import FASTEST, PART, Todo, Variant, aligned

VARIANTS = [variant for variant in Variant if variant <= FASTEST]
BODIES = [(256, 256), (4096, 1 << 20), (256 * 9, 4096), (1 << 20, 1 << 20), ((3 << 20) + 256 * 5, 1 << 20), (1984, 512)]


def test_the_library_is_built_here() -> None:
    assert FASTEST is not Variant.NUMPY and len(VARIANTS) > 1


def parts_of(rng: np.random.Generator, nbytes: int) -> tuple[np.ndarray, list[np.ndarray], np.ndarray, np.ndarray]:
    """Parts that fill two thirds of a body, what they come from, the body before and as it should be."""
    before = rng.integers(0, 256, nbytes, dtype=np.uint8)
    after, sources, parts, at = before.copy(), [], [], 0
    while at < nbytes:
        size = min(int(rng.integers(1, max(2, nbytes // 3))), nbytes - at)
        if rng.random() < 2 / 3:
            offset = int(rng.integers(0, 65))  # tensors begin anywhere
            sources.append(rng.integers(0, 256, size + offset, dtype=np.uint8)[offset:])
            after[at : at + size] = sources[-1]
            parts.append((at, size, sources[-1].ctypes.data))
        at += -(-size // 64) * 64
    return np.array(parts, dtype=PART), sources, before, after


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("nbytes, block_nbytes", BODIES)
def test_blocks_get_the_bytes_of_their_parts_and_the_checksums_of_xxhash(
    nbytes: int, block_nbytes: int, variant: Variant
) -> None:
    rng = np.random.default_rng(nbytes)
    for shift in (0, 8, 64):  # memory that is no multiple of 64 is filled in another way
        parts, sources, before, after = parts_of(rng, nbytes)
        body = aligned(nbytes + shift)[shift:]
        body[:] = before
        blocks = -(-nbytes // block_nbytes)
        todo, table = np.full(blocks, Todo.COPY_AND_CHECK, dtype=np.uint8), np.zeros(blocks, dtype="<u8")
        copy_kernel.fill(body, block_nbytes, parts, todo, 0, blocks, table, variant)
        assert np.array_equal(body, after) and len(sources) == len(parts)
        wanted = [xxhash.xxh3_64_intdigest(after[at : at + block_nbytes].data) for at in range(0, nbytes, block_nbytes)]
        assert table.tolist() == wanted


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_what_is_asked_for_is_done(variant: Variant) -> None:
    block_nbytes, blocks = 4096, 8
    source, body = np.full(block_nbytes * blocks, 7, dtype=np.uint8), aligned(block_nbytes * blocks)
    body[:] = 1
    parts = np.array([(0, source.nbytes, source.ctypes.data)], dtype=PART)
    todo = np.array([Todo.SKIP, Todo.COPY, Todo.COPY_AND_CHECK] * 3, dtype=np.uint8)[:blocks]
    table = np.zeros(blocks, dtype="<u8")
    copy_kernel.fill(body, block_nbytes, parts, todo, 1, 7, table, variant)
    assert [int(body[block * block_nbytes : (block + 1) * block_nbytes].max()) for block in range(blocks)] == [
        1, 7, 7, 1, 7, 7, 1, 1,
    ]  # fmt: skip
    assert np.flatnonzero(table).tolist() == [2, 5]
    copy_kernel.fill(body, block_nbytes, parts, np.minimum(todo, Todo.COPY), 0, blocks, None, variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_copies_between_addresses_are_those_of_memcpy(variant: Variant) -> None:
    rng = np.random.default_rng(1)
    sizes = [1, 63, 64, 4096, (128 << 10) - 1, 128 << 10, (1 << 20) + 77]
    for shift in (0, 1, 13, 64):
        sources = [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]
        rooms = [np.zeros(size + shift + 1, dtype=np.uint8) for size in sizes]
        targets = [room[shift:-1] for room in rooms]
        copy_kernel.copy(*([array.ctypes.data for array in arrays] for arrays in (targets, sources)), sizes, variant)
        assert all(np.array_equal(target, source) for target, source in zip(targets, sources, strict=True))
        assert not any(room[:shift].any() or room[-1] for room in rooms)


def test_arrays_are_copied_whatever_their_strides() -> None:
    large = np.arange(1 << 18).reshape(512, 512)
    for source in (large, large.T, large[:, ::2], large[:3]):
        target = np.zeros_like(source)
        copy_kernel.copy_into(target, source)
        copy_kernel.copy_into(target.T, source.T)
        assert np.array_equal(target, source)
