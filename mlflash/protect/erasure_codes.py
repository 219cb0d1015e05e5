"""Parity of several units, and units rebuilt from what is left of them.

A systematic code over GF(256), polynomial 0x11d, generator 2: of n data units u_0 .. u_n-1, parity j is the sum
of 2^(i*j) * u_i. So parity 0 is their XOR, parities 0 and 1 are RAID-6's P and Q, 0 to 2 are raidz3's. For k up to
3 any n of the n + k units give all others: each square part of the rows 1, x, x^2 (x = 2^i, all different, none 0)
is Vandermonde up to a factor per column, but rows 1 and x^2, and there y^2 - x^2 = (y - x)^2 in characteristic 2.

Source: H. P. Anvin, The mathematics of RAID-6; it is the matrix of ISA-L's ``gf_gen_rs_matrix`` too.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import os
from collections.abc import Sequence

import numpy as np

from ..errors import ConfigError

MAX_UNITS = 32
MAX_PARITY = 3

_TILE_NBYTES = 128 << 10  # of NumPy: with this size, output and scratch stay in the cache
_SPAN_NBYTES = 1 << 30  # per call of ISA-L, which takes the length as a C int


def _powers() -> tuple[np.ndarray, np.ndarray]:
    """List the powers of 2, and the logarithm of each byte.

    The logarithm of 0 is so large that its sum with any other points to a 0 in the powers: a product needs no test for
    0.
    """
    power, log = np.zeros(1023, dtype=np.uint8), np.full(256, 511)
    value = 1
    for exponent in range(255):
        power[[exponent, exponent + 255]] = value
        log[value] = exponent
        value = value << 1 ^ (0x11D if value & 0x80 else 0)
    return power, log


_POWER, _LOG = _powers()


def _times(a: np.ndarray | int, b: np.ndarray | int) -> np.ndarray:
    product: np.ndarray = _POWER[_LOG[a] + _LOG[b]]
    return product


def matrix(data: int, have: Sequence[int], want: Sequence[int]) -> np.ndarray:
    """Compute which combination of some units gives others.

    Args:
        data: number of data units; these are units 0 to ``data - 1``, the parities follow.
        have: the units to start from, exactly ``data`` of them, in the order in which :func:`combine` will get them.
        want: the units to make.

    Returns:
        Coefficients ``(len(want), data)``, uint8, read-only.

    Example:
        ``matrix(3, (0, 1, 2), (3, 4))`` → ``[[1, 1, 1], [1, 2, 4]]``; ``matrix(3, (0, 2, 3), (1,))`` → ``[[1, 1, 1]]``.
    """
    return _matrix(operator.index(data), tuple(map(operator.index, have)), tuple(map(operator.index, want)))


@functools.lru_cache(maxsize=1024)
def _matrix(data: int, have: tuple[int, ...], want: tuple[int, ...]) -> np.ndarray:
    if not 1 <= data < MAX_UNITS:
        raise ValueError(f"{data} data units; 1 to {MAX_UNITS - 1} are possible")
    if len(have) != data:
        raise ValueError(f"{len(have)} units are there, {data} are needed")
    units = min(data + MAX_PARITY, MAX_UNITS)
    for numbers in (have, want):
        if len({*numbers} & {*range(units)}) != len(numbers):
            raise ValueError(f"units {numbers} are not different numbers from 0 to {units - 1}")
    rows = np.vstack([np.eye(data, dtype=np.uint8), *(_parity(data, j) for j in range(units - data))])
    inverse = _invert(rows[list(have)])
    made = np.zeros((len(want), data), dtype=np.uint8)
    for i, unit in enumerate(want):
        made[i] = np.bitwise_xor.reduce(_times(rows[unit][:, None], inverse), axis=0)
    made.flags.writeable = False
    return made


def _parity(data: int, number: int) -> np.ndarray:
    row: np.ndarray = _POWER[np.arange(data) * number]
    return row


def _invert(square: np.ndarray) -> np.ndarray:
    size = len(square)
    both = np.hstack([square, np.eye(size, dtype=np.uint8)])
    for i in range(size):
        pivot = i + int(np.argmax(both[i:, i] != 0))
        both[[i, pivot]] = both[[pivot, i]]
        both[i] = _times(both[i], _POWER[255 - _LOG[both[i, i]]])
        factors = both[:, i].copy()
        factors[i] = 0
        both ^= _times(factors[:, None], both[i])
    return both[:, size:]


def combine(coefficients: np.ndarray, sources: Sequence[np.ndarray | None], out: Sequence[np.ndarray]) -> None:
    """Write ``out[r] = sum over c of coefficients[r, c] * sources[c]``.

    May be called from several threads at once. The sources are only read.

    Args:
        coefficients: ``(len(out), len(sources))`` uint8, as :func:`matrix` gives them.
        sources: each ``(nbytes,)`` uint8 and contiguous, or None for all zeros.
        out: each as a source; none may share memory with another or with a source.

    Raises:
        ConfigError: MLFLASH_ISAL names a library that cannot be used.
    """
    given = [i for i, source in enumerate(sources) if source is not None]
    inputs = [source for source in sources if source is not None]
    if not out:
        return
    assert len({array.nbytes for array in (*out, *inputs)}) == 1, "ISA-L would write behind the shortest array"
    rows = coefficients[:, given]
    isal = _isal()  # for XOR, too: its single pass over 7 + 1 arrays makes 14 GB/s, and NumPy 9.7
    if isal is None or not inputs:
        _by_numpy(rows, inputs, out)
    else:
        _by_isal(isal[1], rows, inputs, out)


def _by_numpy(rows: np.ndarray, sources: Sequence[np.ndarray], out: Sequence[np.ndarray]) -> None:
    """Combine tile by tile, each row by Horner's rule over the bits of its coefficients."""
    bits = [range(int(np.bitwise_or.reduce(row)).bit_length()) for row in rows]
    plans = [[np.flatnonzero(row >> bit & 1).tolist() for bit in b] for row, b in zip(rows, bits, strict=True)]
    nbytes = out[0].nbytes
    spare = np.empty(min(nbytes, _TILE_NBYTES), dtype=np.uint8)
    for at in range(0, nbytes, _TILE_NBYTES):
        tiles = [source[at : at + _TILE_NBYTES] for source in sources]
        for plan, target in zip(plans, out, strict=True):
            _row(plan, tiles, target[at : at + _TILE_NBYTES], spare)


def _row(plan: Sequence[Sequence[int]], tiles: Sequence[np.ndarray], total: np.ndarray, spare: np.ndarray) -> None:
    """Sum up one tile; ``plan[bit]`` lists the sources whose coefficient has that bit."""
    if not plan:
        total.fill(0)
        return
    *lower, top = plan
    if len(top) == 1:
        np.copyto(total, tiles[top[0]])
    else:
        np.bitwise_xor(tiles[top[0]], tiles[top[1]], out=total)
    for column in top[2:]:
        np.bitwise_xor(total, tiles[column], out=total)
    for columns in reversed(lower):
        _double(total, spare[: total.nbytes])
        for column in columns:
            np.bitwise_xor(total, tiles[column], out=total)


def _double(x: np.ndarray, spare: np.ndarray) -> None:
    """Multiply each byte by 2 in GF(256), in place."""
    np.right_shift(x.view(np.int8), 7, out=spare.view(np.int8))  # 0xff if the highest bit is set, otherwise 0
    np.bitwise_and(spare, 0x1D, out=spare)
    np.add(x, x, out=x)
    np.bitwise_xor(x, spare, out=x)


def _by_isal(isal: ctypes.CDLL, rows: np.ndarray, sources: Sequence[np.ndarray], out: Sequence[np.ndarray]) -> None:
    tables = _tables(isal, rows.tobytes(), *rows.shape)
    into, outof = ([array.ctypes.data for array in arrays] for arrays in (out, sources))
    for at in range(0, out[0].nbytes, _SPAN_NBYTES):
        nbytes = min(_SPAN_NBYTES, out[0].nbytes - at)
        isal.ec_encode_data(nbytes, len(outof), len(into), tables, _pointers(outof, at), _pointers(into, at))


def _pointers(addresses: Sequence[int], offset: int) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(addresses))(*(address + offset for address in addresses))


@functools.lru_cache(maxsize=1024)
def _tables(isal: ctypes.CDLL, rows: bytes, wanted: int, units: int) -> ctypes.Array[ctypes.c_char]:
    """Expand coefficients as this library needs them; the format differs between versions and processors."""
    tables = ctypes.create_string_buffer(32 * wanted * units)
    isal.ec_init_tables(units, wanted, rows, tables)
    return tables


def library() -> str:
    """Say what :func:`combine` uses: ``ISA-L (file)`` or ``numpy``. Raises ConfigError if MLFLASH_ISAL is unusable."""
    isal = _isal()
    return "numpy" if isal is None else f"ISA-L ({isal[0]})"


@functools.lru_cache(maxsize=1)
def _isal() -> tuple[str, ctypes.CDLL] | None:
    """Load ISA-L: the library that MLFLASH_ISAL names (0: none), or the one of the distribution."""
    named = os.environ.get("MLFLASH_ISAL", "")
    path = named or "libisal.so.2"
    try:
        return (path, _tried(_open(path))) if path != "0" else None
    except (OSError, AttributeError) as error:
        if named:
            raise ConfigError(f"MLFLASH_ISAL={named}: {error}", expected="libisal.so.2, or 0") from None
        return None


def _tried(isal: ctypes.CDLL) -> ctypes.CDLL:
    """Let a library encode a little, and compare. Raises OSError if it computes something else: it must not be used."""
    units = np.arange(6 * 256, dtype=np.uint64).view(np.uint8).reshape(6, -1) * np.uint8(37)
    by_library, by_numpy = np.empty((3, units.shape[1]), np.uint8), np.empty((3, units.shape[1]), np.uint8)
    coefficients = matrix(6, range(6), range(6, 9))
    _by_isal(isal, coefficients, list(units), list(by_library))
    _by_numpy(coefficients, list(units), list(by_numpy))
    if not np.array_equal(by_library, by_numpy):
        raise OSError("it does not compute what ISA-L does")
    return isal


def _open(path: str) -> ctypes.CDLL:
    isal = ctypes.CDLL(path)
    isal.ec_init_tables.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
    isal.ec_encode_data.argtypes = (*(ctypes.c_int,) * 3, *(ctypes.c_void_p,) * 3)
    isal.ec_init_tables.restype = isal.ec_encode_data.restype = None
    return isal
