"""Rank 0 of two that waits for the courier of rank 1, which was killed with its node and can say nothing any more."""

from __future__ import annotations

import threading

from waiting import is_in, until

from mlflash.config import Config
from mlflash.courier import linked
from mlflash.courier.choice import start_zygote
from mlflash.errors import MlflashError
from mlflash.in_place.decider_link import RoundOver
from mlflash.wireup.epoch_agreement import EpochAgreement
from mlflash.wireup.launch import Meeting

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
until(lambda: is_in(waits, EpochAgreement.agree), lambda: f"the wait for the other rank: {raised}", 40.0)
over.set()
linked.interrupt(RoundOver("a rank was lost"))
until(lambda: not waits.is_alive(), "its end", 40.0)
assert isinstance(raised[0], RoundOver) and not linked.is_linked(), raised
