"""How fast the courier sends: at a rate, and as fast as training bears, on a simulated clock."""

from __future__ import annotations

import random

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
    pace = SendRate(rate, 0, 300, clock)
    for _ in range(3):
        pace.begin()
        nbytes = 200 * CHUNK
        assert send(pace, clock, nbytes, tick_s=1e-5) == pytest.approx(nbytes / rate, rel=0.05)
        pace.end()
        clock.now += 10


class Training:
    """Steps on a link that they share with the courier.

    A step takes 100 ms alone; each byte per second that the courier sends, as a part of the link's, slows it by as
    much of the time that it communicates.
    """

    def __init__(self, pace: SendRate, clock: Clock, link: float, communicates: float, noise: float = 0.0) -> None:
        self.pace, self.clock, self.link, self.communicates = pace, clock, link, communicates
        self.random, self.noise = random.Random(1), noise
        self.slowdowns: list[float] = []

    def run(self, saves: int, nbytes: float, every: int) -> None:
        for _ in range(saves):
            left, steps = nbytes, []
            self.pace.begin()
            for _ in range(every):
                rate = min(self.pace.rate, 0.9 * self.link) if left > 0 else 0.0
                step_s = 0.1 * (1 + self.communicates * rate / self.link) * (1 + self.noise * self.random.gauss(0, 1))
                if left > 0:
                    steps.append(step_s)
                    self.pace._sent += int(min(left, rate * step_s))
                    self.pace._sends += 1
                    left -= rate * step_s
                    if left <= 0:
                        self.clock.now += step_s / 2
                        self.pace.end()
                        self.clock.now -= step_s / 2
                self.clock.now += step_s
                self.pace.step()
            if left > 0:
                self.pace.end()
            self.slowdowns.append(sum(steps) / len(steps) / 0.1 - 1)


def trained(link: float, communicates: float, nbytes: float, noise: float = 0.0, aim: float = 0.03) -> Training:
    clock = Clock()
    training = Training(SendRate(0, aim, 300, clock), clock, link, communicates, noise)
    training.run(60, nbytes, every=100)
    return training


@pytest.mark.parametrize("noise", [0.0, 0.01])
@pytest.mark.parametrize("communicates", [0.1, 0.3, 1.0])
def test_the_rate_goes_down_until_steps_are_slowed_no_more_than_they_may_be(communicates: float, noise: float) -> None:
    training = trained(1e9, communicates, 0.2e9, noise)
    assert training.slowdowns[0] > 0.08
    late = training.slowdowns[30:]
    assert sum(late) / len(late) < 0.035 and max(late) < 0.06


def test_a_save_is_through_before_the_next_one_whatever_it_costs() -> None:
    training = trained(1e9, 1.0, 5e9)  # it must be through in 0.8 of the 10 to 14 s between saves
    assert training.slowdowns[-1] > 0.3
    assert training.pace.rate > 0.4e9
