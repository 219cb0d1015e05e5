"""How fast the courier sends: at a rate, or as fast as it can, on a simulated clock."""

from __future__ import annotations

import pytest

from mlflash.mpi.send_rate import SendRate

CHUNK = 4 << 20


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def send(pace: SendRate, clock: Clock, nbytes: int, tick_s: float = 1e-3) -> float:
    """Send in chunks over a link that takes no time; returns the seconds."""
    start = clock.now
    for _ in range(nbytes // CHUNK):
        for _ in pace.send(CHUNK):
            clock.now += tick_s
    return clock.now - start


@pytest.mark.parametrize("rate", [1e9, 20e9])
def test_bytes_go_at_the_rate_and_pauses_are_not_made_up_for(rate: float) -> None:
    clock = Clock()
    pace = SendRate(rate, clock)
    for _ in range(3):
        nbytes = 200 * CHUNK
        assert send(pace, clock, nbytes, tick_s=1e-5) == pytest.approx(nbytes / rate, rel=0.05)
        clock.now += 10


def test_without_a_rate_nothing_waits() -> None:
    clock = Clock()
    assert send(SendRate(0, clock), clock, 1 << 40) == 0
