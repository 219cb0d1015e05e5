"""Steps of a training, each about ten milliseconds long: what a main thread does while the courier works."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

COMPUTES, WAITS, PYTHON = "matrix products", "waits for a device", "a Python loop"
STEP_S = 0.01
LAUNCHES_S = 0.002  # of a step that waits
WIDTH, TOKENS, HEADS = 256, 64, 4

Step = Callable[[], None]


def step_of(kind: str) -> Step:
    """Make a step; it ends with one of a torch optimizer, as a `Checkpointer` with ``max_slowdown=`` times those."""
    torch.set_num_threads(1)
    if kind == COMPUTES:
        return _computing()
    work = _waiting() if kind == WAITS else _python()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)

    def step() -> None:
        work()
        optimizer.step()

    return step


def _computing() -> Step:
    """Forward, backward and step of a block of a GPT, in the caches of a core."""
    block = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
    optimizer = torch.optim.SGD(block.parameters(), lr=1e-6)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(TOKENS)
    batch = torch.randn(1, TOKENS, WIDTH)

    def once() -> None:
        optimizer.zero_grad()
        block(batch, src_mask=mask, is_causal=True).square().mean().backward()
        optimizer.step()

    batch = torch.randn(_times(once, STEP_S), TOKENS, WIDTH)
    return once


def _waiting() -> Step:
    """What a rank with a GPU does: many small calls, as launches of kernels are, and a wait that lets go of the GIL.

    As if the device began only when all is launched: with a queue that never runs dry, slower launches cost less.
    """
    small = torch.zeros(16)
    times = _times(lambda: small.add_(1.0), LAUNCHES_S)

    def work() -> None:
        for _ in range(times):
            small.add_(1.0)
        time.sleep(STEP_S - LAUNCHES_S)

    return work


def _python() -> Step:
    """A loop that never lets go of the interpreter by itself."""

    def loop(times: int = 1000) -> None:
        for _ in range(times):
            pass

    times = 1000 * _times(loop, STEP_S)
    return lambda: loop(times)


def _times(work: Callable[[], object], seconds: float) -> int:
    """How often something can be done in so many seconds."""
    for _ in range(3):
        work()
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < 20 * seconds:
        work()
        done += 1
    return max(1, done // 20)


def steps_for(step: Step, seconds: float) -> list[float]:
    """Make steps for so long; gives the seconds of each."""
    end = time.perf_counter() + seconds
    return steps_until(step, lambda: time.perf_counter() >= end)


def steps_until(step: Step, ended: Callable[[], bool]) -> list[float]:
    """Make steps until something has ended; gives the seconds of those that were made before, of one at least."""
    found: list[float] = []
    while True:
        start = time.perf_counter()
        step()
        took = time.perf_counter() - start
        if ended() and found:
            return found
        found.append(took)
        if ended():
            return found
