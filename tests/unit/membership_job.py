"""A membership of processes that a test moves, and all that it does, written down."""

from __future__ import annotations

import json
from typing import Any

from mlflash.launch.cause import Cause
from mlflash.run.membership import Deadlines, Member, Membership, Stuck

KILLED = 137
DEADLINES = Deadlines(lost_s=5.0, leave_s=30.0, hang_s=60.0, ready_s=120.0)


class Job:
    """A membership, and all that it does, written down. It is `Acts`, too.

    Args:
        ranks, spares: the host of each process, as in "a a b"; those of a host are a0, a1 and so on.
        begins: whether all have begun to train, at step 10, and all spares wait.
        least, most: the smallest and the largest number of ranks; 0: as many as there are.
    """

    def __init__(self, ranks: str, spares: str = "", begins: bool = True, least: int = 0, most: int = 0):
        self.members: list[Member] = []
        for number, host in enumerate((ranks + " " + spares).split()):
            local = sum(one.host == host for one in self.members)
            rank = number if number < len(ranks.split()) else None
            self.members.append(Member(f"{host}{local}", host, local, rank))
        self.now, self.told = 1000.0, list[tuple[str, dict[str, Any]]]()
        self.killed, self.started, self.given_up = list[str](), list[str](), list[str]()
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.it = Membership(self.members, self, DEADLINES, self.now, least, most)
        if begins:
            self.ready(*(one.name for one in self.members))
            self.train(*(one.name for one in self.members if one.rank is not None))
            assert self.hears() and not self.notes

    # What it does

    def tell(self, name: str, message: dict[str, Any]) -> None:
        self.told.append((name, json.loads(json.dumps(message))))

    def kill(self, name: str) -> None:
        self.killed.append(name)

    def lose(self, host: str, why: str) -> None:
        self.given_up.append(host)

    def start(self, host: str, local: int) -> str:
        self.started.append(f"{host}{local}.{len(self.started) + 1}")
        return self.started[-1]

    def note(self, event: str, **fields: Any) -> None:
        self.notes.append((event, json.loads(json.dumps(fields))))

    # What happens

    def ready(self, *names: str) -> None:
        for name in names:
            self.it.ready(name, self.now)

    def leave(self, *names: str, unit: int = 1) -> None:
        for name in names:
            self.it.left(name, self.it.round, self.now, unit)

    def pause(self, *names: str, saved: int = 10) -> None:
        """Say what was saved last, and then that the next save is committed."""
        for name in names:
            self.it.saved(name, self.it.round, saved)
        for name in names:
            self.it.paused(name, self.it.round, self.now)

    def train(self, *names: str, step: int = 10, unit: int = 1) -> None:
        for name in names:
            self.it.trains(name, self.it.round, step, {}, self.now, unit)

    def move(self, host: str) -> str:
        return self.it.move(host, self.now)

    def back(self, host: str) -> None:
        self.it.host_back(host, self.now)

    def stuck(self, name: str, count: int, idle_s: float = 70.0, limit_s: float = 60.0, waits: bool = True) -> None:
        at = Stuck(count, idle_s, limit_s, waits, "allreduce", f"{name}.py:7 (step)")
        self.it.stuck(name, self.it.round, at, self.now)

    def end(self, *names: str, code: int = KILLED, why: str = "it was killed", kind: str = "killed") -> None:
        for name in names:
            self.it.ended(name, code, Cause(kind, why), self.now)

    def crash(self, host: str) -> None:
        self.it.host_lost(host, f"{host} burns", self.now)

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.it.look(self.now)

    # What came of it

    def hears(self) -> dict[str, list[str]]:
        """What each process was told since this was asked last: a seat as "round: rank", a loss as "lost round"."""
        said: dict[str, list[str]] = {}
        for name, message in self.told:
            match message:
                case {"seat": {"round": number, "rank": rank}}:
                    word = f"{number}: {rank}"
                case {"lost": number}:
                    word = f"lost {number}"
                case {"where": number}:
                    word = f"where {number}"
                case {"pause": number}:
                    word = f"pause {number}"
                case {"pause_after": _, "step": step}:
                    word = f"pause after {step}"
                case {"go_on": number}:
                    word = f"go on {number}"
                case {"is": text}:
                    word = text
            said.setdefault(name, []).append(word)
        self.told.clear()
        return said

    def seats(self) -> dict[str, str]:
        """What each process is told, where that is one thing."""
        return {name: words[0] for name, words in self.hears().items() if len(words) == 1}
