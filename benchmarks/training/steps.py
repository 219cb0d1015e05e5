"""Training steps of about ten milliseconds, which the main thread makes while the courier works."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

COMPUTES, WAITS, PYTHON = "matrix products", "waits for a device", "a Python loop"
STEP_S = 0.01
LAUNCHES_S = 0.002  # seconds of calls in a step that waits
WIDTH, TOKENS, HEADS = 256, 64, 4

Step = Callable[[], None]


def step_of(kind: str) -> Step:
    """Make a step. It ends with a step of a torch optimizer."""
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
    """Make forward, backward and step of a GPT block that fits into the caches of a core."""
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
    """Make steps like those of a rank with a GPU: many small calls, like kernel launches, and a wait without the GIL.

    The wait begins after all calls, as if the device began only then. If the queue of a real device never runs empty,
    slower launches cost less.
    """
    small = torch.zeros(16)
    times = _times(lambda: small.add_(1.0), LAUNCHES_S)

    def work() -> None:
        for _ in range(times):
            small.add_(1.0)
        time.sleep(STEP_S - LAUNCHES_S)

    return work


def _python() -> Step:
    """Make a loop that never releases the interpreter by itself."""

    def loop(times: int = 1000) -> None:
        for _ in range(times):
            pass

    times = 1000 * _times(loop, STEP_S)
    return lambda: loop(times)


def _times(work: Callable[[], object], seconds: float) -> int:
    """Return how often ``work`` can run in this number of seconds."""
    for _ in range(3):
        work()
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < 20 * seconds:
        work()
        done += 1
    return max(1, done // 20)


def steps_for(step: Step, seconds: float) -> list[float]:
    """Make steps for this number of seconds. Return the seconds of each step."""
    end = time.perf_counter() + seconds
    return steps_until(step, lambda: time.perf_counter() >= end)


def steps_until(step: Step, ended: Callable[[], bool]) -> list[float]:
    """Make steps until ``ended`` is true. Return the seconds of the steps before that, at least of one."""
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
