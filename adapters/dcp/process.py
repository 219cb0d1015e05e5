"""How the child of `async_checkpointer_type=PROCESS` asks its parent: a socket of this machine, and one answer each.

The child must not touch MPI (it would read its parent's connection to the launcher), and the slots are the parent's. So
it plans, and asks the parent to do the rest.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Client, Listener
from typing import Any

from mlflash.errors import DeadlineExceeded

log = logging.getLogger("mlflash")


@dataclasses.dataclass(frozen=True)
class Door:
    """Where the parent is asked, and the secret without which it does not answer."""

    address: str
    key: bytes

    def ask(self, question: Any, timeout_s: float) -> Any:
        """Ask the parent and wait for its answer.

        Raises:
            DeadlineExceeded: there was none in time.
            Exception: what the parent raised.
        """
        with Client(self.address, "AF_UNIX", authkey=self.key) as line:
            line.send(question)
            if not line.poll(timeout_s):
                raise DeadlineExceeded(f"the parent process did not answer for {timeout_s:g} s")
            answer = line.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer


def open_door(answer: Callable[[Any], Any]) -> Door:
    """Answer questions in a thread of this process, until it ends.

    Args:
        answer: what it raises is raised where it was asked.
    """
    door = Door(f"\0mlflash-{os.getpid()}-{os.urandom(8).hex()}", os.urandom(32))
    listener = Listener(door.address, "AF_UNIX", authkey=door.key)
    threading.Thread(target=_listen, args=(listener, answer), name="mlflash-dcp", daemon=True).start()
    return door


def _listen(listener: Listener, answer: Callable[[Any], Any]) -> None:
    while True:
        try:
            with listener.accept() as line:
                try:
                    told = answer(line.recv())
                except Exception as error:  # raised where it was asked
                    told = error
                line.send(told)
        except Exception as error:  # a child that ended, or a stranger: the next one is answered all the same
            log.warning("a question of a checkpoint process was not answered: %r", error)
