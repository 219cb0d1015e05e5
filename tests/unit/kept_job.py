"""Processes that stay when others are lost, for tests of who starts them and decides: what they do, and what they say.

A rank of `RANK` waits for its seat, says that it trains, has the text of rank 0, and leaves when another one is lost.
What it does it adds to a file, a line each, with its process number before it.
"""

from __future__ import annotations

from pathlib import Path

from processes import described, runs
from waiting import until

from mlflash.run.started_ranks import StartedRanks

# As ssh: nothing of the environment travels, the words are those of a shell, and it begins elsewhere. At "apart" what
# it starts is in a session of its own, as on another machine. "dark" does not answer, and "gone" cannot be reached.
SHELL = """#!/bin/bash
echo $$ > {folder}/shell-$1
host=$1; shift; cd /
case $host in
dark) exec sleep 1000;;
gone) echo "connect to host gone: No route to host" >&2; exit 255;;
apart)
    exec 3<&0
    setsid -w env -i PATH=/usr/bin:/bin sh -c "$*" < <(exec cat <&3) 3<&-
    exit;;
esac
exec env -i PATH=/usr/bin:/bin FROM_LOGIN=$host sh -c "$*"
"""
RANK = """
import json, os, signal, sys
from mlflash.errors import MlflashError
from mlflash.run.decider_link import RoundOver, decider, is_spare

def say(*words):
    os.write(said, f"{os.getpid()} {' '.join(map(str, words))}\\n".encode())

folder = sys.argv[1]
said = os.open(folder + "/said", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
where = [os.environ.get(name, "none") for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")]
link = decider()
assert decider() is link and is_spare() == link.waits == ("MASTER_PORT" not in os.environ)
link.on_lost.append(lambda number: say("heard"))
link.on_lost.append(lambda number: 1 / 0)  # harms nobody
say("begins", json.loads(os.environ["MLFLASH_KEPT"])["name"], *where)
link.say({"ready": True})
number, odd = 0, False
try:
    while True:
        seat = link.seat(number)
        number = seat.round
        try:
            text = link.share(number, "port", f"of-{number}" if seat.rank == 0 else None, 100.0)
            say("seat", number, seat.rank, seat.size, text)
            link.say({"trains": number, "step": number, "times": {"all": 1.0}, "unit": 1})
            while not link.is_over(number, 0.02):
                if not odd and os.path.exists(folder + "/odd"):
                    odd = True
                    for message in ({"left": "x", "unit": 1}, {"left": []}, {"left": 1}, {"trains": 1}, {"no": 1},
                                    {"text": 1, "what": "port"}):
                        link.say(message)
                    say("odd")
                if os.path.exists(folder + "/end"):
                    raise SystemExit(0)
                if link._has_ended:
                    raise MlflashError("nobody decides")
            link.check(number)
        except RoundOver:
            say("left", number)
            link.say({"left": number, "unit": 1})
except MlflashError:
    say("alone")
    signal.pause()
"""


class Said:
    """What the processes of a job have said, in the folder that they were given."""

    def __init__(self, folder: Path):
        self.folder = folder

    def lines(self) -> list[tuple[int, list[str]]]:
        path = self.folder / "said"
        text = path.read_text() if path.exists() else ""
        return [(int(line.split()[0]), line.split()[1:]) for line in text.splitlines()]

    def of(self, what: str) -> list[tuple[int, list[str]]]:
        return [(pid, words[1:]) for pid, words in self.lines() if words[0] == what]

    def begun(self) -> dict[str, int]:
        """The process of each name."""
        return {words[0]: pid for pid, words in self.of("begins")}

    def seats(self, number: int) -> list[int]:
        """The process of each rank of a round, when all have come."""

        def found() -> list[int]:
            seats = [(pid, words) for pid, words in self.of("seat") if words[0] == str(number)]
            assert all(words[3] == f"of-{number}" for _, words in seats)
            ranks = {int(words[1]): pid for pid, words in seats}
            assert len(ranks) == len(seats), f"a rank of round {number} was given twice: {self.lines()}"
            size = int(seats[0][1][2]) if seats else 0
            return [ranks[rank] for rank in range(size)] if size and len(ranks) == size else []

        return until(found, lambda: f"round {number}: {self.lines()}")


def is_gone(pid: int) -> bool:
    """Whether a process has ended; it may be that nobody has waited for it."""
    return not runs(pid)


def all_gone(*pids: int) -> None:
    until(lambda: not any(map(runs, pids)), lambda: f"the end of {[described(pid) for pid in pids if runs(pid)]}")


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def code_of(ranks: StartedRanks) -> int:
    found: list[int | None] = until(lambda: [ranks.poll()] if ranks.poll() is not None else [], "the end of all")
    return found[0] or 0
