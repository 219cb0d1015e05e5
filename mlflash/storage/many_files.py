"""Do the same with each of very many files, on several threads: a file system answers many requests at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

THREADS = 16
_LEAST = 8  # items per thread, at least: for fewer, starting it takes longer


def each(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Do something with each item, in any order, and wait until all is done.

    The threads end with the process: a file system that hangs delays nobody else.

    Returns:
        The results, in the order of the items.

    Raises:
        Exception: what the work raised for one of the items; no other item is begun after that.
    """
    results: list[Result | None] = [None] * len(items)
    errors: list[Exception] = []
    left = iter(range(len(items)))

    def run() -> None:
        try:
            for at in left:  # each number goes to one thread
                if errors:
                    return
                results[at] = work(items[at])
        except Exception as error:  # raised below
            errors.append(error)

    threads = [threading.Thread(target=run, name="mlflash-files", daemon=True)
               for _ in range(min(THREADS, len(items) // _LEAST) - 1)]  # fmt: skip
    for thread in threads:
        thread.start()
    run()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results  # type: ignore[return-value]
