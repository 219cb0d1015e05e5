"""Any n of n + k units give all others, the same bytes with and without ISA-L, and those that other codes make."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlflash.errors import ConfigError
from mlflash.protect import erasure_codes

KERNELS = ("numpy", "ISA-L")

# Products by the book: shift and add, then take the polynomial away.
_a, _b = np.arange(256)[:, None], np.arange(256)
TIMES = np.bitwise_xor.reduce([(_a << bit) * (_b >> bit & 1) for bit in range(8)])
for _bit in range(14, 7, -1):
    TIMES ^= (0x11D << _bit - 8) * (TIMES >> _bit & 1)


def isal_of_pyeclib() -> str:
    """The ISA-L in the wheel of pyeclib, for machines whose distribution has no libisal2; "" if there is none."""
    try:
        files = importlib.metadata.files("pyeclib") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    return next((str(file.locate()) for file in files if file.name.startswith("libisal") and ".so" in file.name), "")


@contextlib.contextmanager
def using(kernel: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        for named in ("0",) if kernel == "numpy" else ("", isal_of_pyeclib()):
            monkeypatch.setenv("MLFLASH_ISAL", named)
            erasure_codes._isal.cache_clear()
            if erasure_codes.library().startswith(kernel):
                break
        else:
            pytest.skip("needs ISA-L: install libisal2 or pyeclib")
        yield
    erasure_codes._isal.cache_clear()


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    with using(request.param):
        yield request.param


def random_units(number: int, nbytes: int, seed: int = 0) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).integers(0, 256, (number, nbytes), dtype=np.uint8))


def made(coefficients: np.ndarray, sources: Sequence[np.ndarray | None], nbytes: int) -> list[np.ndarray]:
    memory = np.full((len(coefficients), nbytes + 64), 0xA5, dtype=np.uint8)
    out = [row[33 : 33 + nbytes] for row in memory]
    erasure_codes.combine(coefficients, sources, out)
    assert np.all(memory[:, :33] == 0xA5) and np.all(memory[:, 33 + nbytes :] == 0xA5), "written outside of out"
    return out


def with_parity(units: list[np.ndarray], parities: int) -> list[np.ndarray]:
    n = len(units)
    return units + made(erasure_codes.matrix(n, range(n), range(n, n + parities)), units, units[0].nbytes)


def made_good(units: list[np.ndarray], n: int, have: Sequence[int], lost: Sequence[int]) -> bool:
    rebuilt = made(erasure_codes.matrix(n, have, lost), [units[unit] for unit in have], units[0].nbytes)
    return all(np.array_equal(units[unit], content) for unit, content in zip(lost, rebuilt, strict=True))


def by_the_book(coefficients: np.ndarray, sources: Sequence[np.ndarray]) -> np.ndarray:
    rows = [[TIMES[c, source] for c, source in zip(row, sources, strict=True)] for row in coefficients]
    return np.bitwise_xor.reduce(np.array(rows, dtype=np.uint8), axis=1)


@pytest.mark.parametrize("n", range(1, 9))
def test_every_loss_of_up_to_k_units_is_made_good_and_one_more_is_refused(n: int, kernel: str) -> None:
    for k in range(1, erasure_codes.MAX_PARITY + 1):
        units = with_parity(random_units(n, 67), k)
        for lost in itertools.chain.from_iterable(itertools.combinations(range(n + k), r) for r in range(k + 1)):
            remaining = [unit for unit in range(n + k) if unit not in lost]
            for have in (remaining[:n], remaining[: -n - 1 : -1]):  # as little, and as much, parity as there is
                assert made_good(units, n, have, lost), (k, have, lost)
        for lost in itertools.combinations(range(n + k), k + 1):
            with pytest.raises(ValueError, match=f"{n - 1} units are there, {n} are needed"):
                erasure_codes.matrix(n, [unit for unit in range(n + k) if unit not in lost], lost)


@given(shape=st.data(), nbytes=st.integers(0, 5000), n=st.integers(1, 29), k=st.integers(1, 3), seed=st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_both_kernels_make_the_same_bytes(shape: st.DataObject, nbytes: int, n: int, k: int, seed: int) -> None:
    have = shape.draw(st.permutations(range(n + k)))[:n]
    lost = [unit for unit in range(n + k) if unit not in have]
    results = []
    for kernel in KERNELS:
        with using(kernel):
            units = with_parity(random_units(n, nbytes, seed), k)
            assert made_good(units, n, have, lost)
            results.append(b"".join(unit.tobytes() for unit in units))
    assert results[0] == results[1]


@given(seed=st.integers(0, 999), nbytes=st.integers(0, 200), rows=st.integers(1, 7), columns=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_any_coefficients_give_the_sum_by_the_book(seed: int, nbytes: int, rows: int, columns: int) -> None:
    coefficients = np.array(random_units(rows, columns, seed))
    sources = random_units(columns, nbytes)
    for kernel in KERNELS:
        with using(kernel):
            assert np.array_equal(made(coefficients, sources, nbytes), by_the_book(coefficients, sources))


def test_the_matrix_is_that_of_raid_6_and_raidz3() -> None:
    assert np.array_equal(erasure_codes._times(_a, _b), TIMES)
    assert erasure_codes.matrix(3, (0, 1, 2), (3, 4, 5)).tolist() == [[1, 1, 1], [1, 2, 4], [1, 4, 16]]
    assert erasure_codes.matrix(9, range(9), (10,)).tolist() == [[1, 2, 4, 8, 16, 32, 64, 128, 0x1D]]
    assert erasure_codes.matrix(3, (3, 2, 0), (1, 2)).tolist() == [[1, 1, 1], [0, 1, 0]]
    assert erasure_codes.matrix(31, range(31), (31,)).tolist() == [[1] * 31]
    assert erasure_codes.matrix(2, [np.int64(0), np.int64(1)], []).shape == (0, 2)


def test_no_square_part_of_29_units_and_3_parities_is_singular() -> None:
    """So that any n units are enough: a loss of r data units is a system of r equations."""
    rows = erasure_codes.matrix(29, range(29), (29, 30, 31))

    def minor(r: int, s: int, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        return TIMES[rows[r, i], rows[s, j]] ^ TIMES[rows[r, j], rows[s, i]]

    assert np.all(rows)
    i, j = np.array([*itertools.combinations(range(29), 2)]).T
    assert all(np.all(minor(r, s, i, j)) for r, s in ((0, 1), (0, 2), (1, 2)))
    i, j, k = np.array([*itertools.combinations(range(29), 3)]).T
    terms = [TIMES[rows[0, a], minor(1, 2, b, c)] for a, b, c in ((i, j, k), (j, i, k), (k, i, j))]
    assert np.all(np.bitwise_xor.reduce(terms))


def test_a_named_library_that_cannot_be_used_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import _ctypes

    for name in ("/no/such/libisal.so.2", _ctypes.__file__):
        monkeypatch.setenv("MLFLASH_ISAL", name)
        erasure_codes._isal.cache_clear()
        with pytest.raises(ConfigError, match=f"MLFLASH_ISAL={name}: "):
            erasure_codes.library()
