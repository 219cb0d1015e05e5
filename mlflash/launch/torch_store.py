"""A text that rank 0 gives to the other ranks of its launch through a store of torch.distributed.

A store may survive a launch, as that of torchrun does when it starts its workers again, and then contain what dead
ranks wrote. So every rank asks with a random word that it has just made, gets its answer under that word, and confirms
with the word that rank 0 has made:

| key below ``mlflash/`` | written by | holds                                 |
|------------------------|------------|---------------------------------------|
| ``ask/RANK``           | each rank  | its word                              |
| ``answer/WORD``        | rank 0     | the word of rank 0, a space, the text |
| ``got/WORD``           | that rank  | the word of rank 0                    |

Rank 0 reads what a rank asks until that rank has confirmed, deletes all three keys, and returns when all ranks have.
"""

from __future__ import annotations

import contextlib
import datetime
import secrets
import time
from typing import Any

from ..errors import DeadlineExceeded

_PREFIX = "mlflash"
_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05


def share(torch: Any, store: Any, rank: int, size: int, text: str | None, timeout_s: float) -> str:
    """Give rank 0's text to all ranks, by a store that all reach. Collective.

    ``torch`` is the module torch.distributed. Raises DeadlineExceeded: some ranks have not come, or the store is lost.
    """
    own = torch.PrefixStore(_PREFIX, store)
    try:
        if text is None:
            return _ask(own, rank, timeout_s)
        missing = _answer(own, size, text, timeout_s)
    except RuntimeError as error:  # torch's errors of a store that is late or lost are RuntimeErrors, too
        raise DeadlineExceeded(
            f"waited {timeout_s:g} s for rank 0 to put into the store of torch.distributed where its agent is: "
            f"{str(error).splitlines()[0]}",
            rank=rank,
            ranks=[0],
        ) from error
    if missing:
        raise DeadlineExceeded(
            f"waited {timeout_s:g} s for the other ranks to ask rank 0, through the store of torch.distributed, where "
            f"its agent is: {len(missing)} of {size} have not come",
            rank=0,
            ranks=missing,
        )
    return text


def _ask(store: Any, rank: int, timeout_s: float) -> str:
    word = secrets.token_hex(8)
    store.set(f"ask/{rank}", word)
    store.wait([f"answer/{word}"], datetime.timedelta(seconds=timeout_s))
    whose, _, text = _read(store, f"answer/{word}").partition(" ")
    store.set(f"got/{word}", whose)
    return text


def _answer(store: Any, size: int, text: str, timeout_s: float) -> list[int]:
    """Answer all other ranks; return those that have not come."""
    end, pause_s, mine = time.monotonic() + timeout_s, _PAUSE_S, secrets.token_hex(8)
    words: dict[int, str] = dict.fromkeys(range(1, size), "")  # for ranks without confirmation: the word answered last
    while words:
        before = len(words)
        for rank, word in list(words.items()):
            if word and _read(store, f"got/{word}") == mine:
                _forget(store, [f"ask/{rank}", f"answer/{word}", f"got/{word}"])
                del words[rank]
            elif (asked := _read(store, f"ask/{rank}")) != word:
                store.set(f"answer/{asked}", f"{mine} {text}")
                words[rank] = asked
        if time.monotonic() >= end:
            break
        pause_s = _PAUSE_S if len(words) < before else min(2 * pause_s, _LONGEST_PAUSE_S)
        time.sleep(pause_s)
    return sorted(words)


def _read(store: Any, key: str) -> str:
    """The value of a key; "" if it does not exist."""
    return bytes(store.get(key)).decode("ascii") if store.check([key]) else ""


def _forget(store: Any, keys: list[str]) -> None:
    with contextlib.suppress(RuntimeError, NotImplementedError):  # not every store can
        for key in keys:
            store.delete_key(key)
