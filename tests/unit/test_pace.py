"""How fast the courier sends: at a rate, and as fast as training bears, on a simulated clock."""

from __future__ import annotations

import random
from collections.abc import Iterator

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


STEP_S = 0.045


class SlowLink:
    """Steps on a link that is slow: while a transfer occupies it, for several steps, training has half its speed.

    Args:
        pace: what is tested.
        clock: its clock.
        chunk: bytes of a transfer.
        link: bytes per second.
    """

    def __init__(self, pace: SendRate, clock: Clock, chunk: int, link: float = 25e6):
        self.pace, self.clock, self.chunk, self.link = pace, clock, chunk, link
        self.stall_s = 0.0  # of a save

    def save(self, chunks: int, every: int) -> tuple[float, float]:
        """Make so many steps, and a save with the first; gives its slowdown and the seconds that it took."""
        self.clock.now += self.stall_s
        self.pace.stalled(self.stall_s)
        start, free_at, ended = self.clock.now, 0.0, 0.0
        self.pace.begin()
        sending, work = self.courier(chunks), 0.0
        beside = steps = 0
        while steps < every:
            self.clock.now += 1e-3
            if not ended and self.clock.now >= free_at:
                moved = next(sending, None)
                if moved is None:
                    ended = self.clock.now
                    self.pace.end()
                elif moved:
                    free_at = self.clock.now + self.chunk / self.link
            work += 1e-3 * (0.5 if self.clock.now < free_at else 1.0)
            if work >= STEP_S:
                work -= STEP_S
                steps += 1
                beside += not ended
                self.pace.step()
        return (ended - start) / max(1, beside) / STEP_S - 1, ended - start

    def courier(self, chunks: int) -> Iterator[bool]:
        for _ in range(chunks):
            yield from self.pace.send(self.chunk)
            yield True


@pytest.mark.parametrize(("aim", "chunk"), [(0.03, CHUNK), (0.1, 1 << 18)])
def test_transfers_that_take_longer_than_a_step_slow_training_no_more_than_asked(chunk: int, aim: float) -> None:
    clock = Clock()
    link = SlowLink(SendRate(0, aim, 300, clock), clock, chunk)
    assert link.save(8 * CHUNK // chunk, 1000)[0] > aim
    late = [link.save(8 * CHUNK // chunk, 1000) for _ in range(30)][20:]
    slowdown = sum(one for one, _ in late) / len(late)
    assert 0.2 * aim < slowdown < 1.3 * aim
    assert max(seconds for _, seconds in late) < 0.9 * 1000 * STEP_S
