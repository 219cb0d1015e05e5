"""Measures again how fast one core of this machine copies, checks and codes, as input for the model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import xxhash

from mlflash.redundancy import erasure_codes

_BLOCK_NBYTES, _BLOCKS, _REPETITIONS = 1 << 20, 64, 9


def measure() -> dict[str, tuple[float, float, float]]:
    """Measure the rates of "memcpy", "check", "xor" and "rs": bytes per second, as median and quartiles."""
    source = np.ones((_BLOCKS, _BLOCK_NBYTES), dtype=np.uint8)
    into = np.ones_like(source)
    eight, six = source[:7], source[:6]

    def code(data: np.ndarray, parities: int) -> Callable[[], None]:
        many = len(data)
        matrix = erasure_codes.matrix(many, tuple(range(many)), tuple(range(many, many + parities)))
        return lambda: erasure_codes.combine(matrix, list(data), list(into[:parities]))

    def check() -> None:
        for block in source:
            xxhash.xxh3_64_intdigest(block.data)

    return {
        "memcpy": _rate(lambda: np.copyto(into, source), source.nbytes),
        "check": _rate(check, source.nbytes),
        "xor": _rate(code(eight, 1), eight.nbytes),
        "rs": _rate(code(six, 2), six.nbytes),
    }


def _rate(work: Callable[[], None], nbytes: int) -> tuple[float, float, float]:
    work()
    rates = []
    for _ in range(_REPETITIONS):
        start = time.perf_counter()
        for _ in range(4):
            work()
        rates.append(4 * nbytes / (time.perf_counter() - start))
    low, middle, high = statistics.quantiles(rates, n=4)
    return middle, low, high
