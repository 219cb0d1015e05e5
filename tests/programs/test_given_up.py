"""A wait for the couriers of others ends when one of these is lost, and not with its deadline."""

from __future__ import annotations

import threading

import needs
import pytest
from waiting import is_in, until

from mlflash.config import Config
from mlflash.courier import linked
from mlflash.courier.choice import start_zygote
from mlflash.errors import MlflashError
from mlflash.in_place.decider_link import RoundOver
from mlflash.wireup.epoch_agreement import EpochAgreement
from mlflash.wireup.launch import Meeting

pytestmark = [needs.MPI, needs.PMI_1]


def test_who_waits_for_couriers_of_others_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of two, of which the other one was killed with its node, and can say nothing any more."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    over = threading.Event()
    raised: list[BaseException] = []

    def check() -> None:
        if over.is_set():
            raise RoundOver("a rank was lost")

    def share(text: str | None, timeout_s: float) -> str:
        check()
        return text or ""

    def link() -> None:
        try:
            linked.link_anew(Config(job="given-up"), start_zygote(2), Meeting(share, check, 1000.0))
        except (MlflashError, OSError) as error:
            raised.append(error)

    waits = threading.Thread(target=link)
    waits.start()
    until(lambda: is_in(waits, EpochAgreement.agree), lambda: f"the wait for the other rank: {raised}")
    over.set()
    linked.interrupt(RoundOver("a rank was lost"))
    until(lambda: not waits.is_alive(), "its end")
    assert isinstance(raised[0], RoundOver) and not linked.is_linked()
