"""What a seed draws: the setting of a history, and the faults of each of its launches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from random import Random

LEAST_NODES = {"copy": 2, "copy:2": 3, "xor:3": 3, "rs:2+1": 3, "rs:2+2": 4}
_SCHEMES = ["copy", "copy", "copy:2", "xor:3", "xor:3", "rs:2+1", "rs:2+2"]
LAYOUTS = [(2, 1), (2, 1), (2, 1), (3, 1), (3, 1), (4, 1), (4, 2)]  # ranks, and ranks per node
_POINTS_OF = {"drain": "drain", "lazy": "lazy", "repair": "repair", "common": "share", "grow": "room"}
_MADE_AGAIN = {"restore.rebuilt", "restore.fetched", "reprotect.copied"}
_SPECIAL = ("drain", "lazy", "elastic", "values", "repair", "grow", "common", "zeros", "kept")


@dataclasses.dataclass
class Setting:
    """What is the same in all launches of a history, but for the number of ranks where it is elastic.

    Attributes:
        special: what this history is about, in addition to saves, kills and restores.
        no_space, bad_sync: probabilities that a file in memory gets no room, and that a drained file is not written.
        format: of drained files.
        meets: how trainers meet: by the communicator that they give (comm), by their MPI (mpi), or without (launcher).
        pace: of messages; see `mpi.Network`.
    """

    ranks: int
    per_node: int
    scheme: str
    transport: str
    nbytes: int
    special: frozenset[str]
    meets: str
    pace: str
    has_errors: bool
    when_busy: str
    no_space: float
    bad_sync: float
    format: str
    stops: bool
    flips: bool
    launches: int

    @property
    def nodes(self) -> int:
        return self.ranks // self.per_node


def parse(words: Iterable[str]) -> dict[str, object]:
    """Fields of `Setting` from words such as ``ranks=3`` or ``special=drain+lazy`` (``special=``: nothing special).

    Raises:
        ValueError: there is no such field.
    """
    kinds = {field.name: field.type for field in dataclasses.fields(Setting)}
    fixed: dict[str, object] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in kinds:
            raise ValueError(f"a setting has no {name!r}: expected one of {', '.join(kinds)}")
        if name == "special":
            fixed[name] = frozenset(filter(None, value.split("+")))
        else:
            fixed[name] = {"int": int, "float": float, "bool": lambda text: text == "True"}.get(kinds[name], str)(value)
    return fixed


def parse_seeds(word: str) -> tuple[range, dict[str, object]]:
    """Seeds and their settings, from a word such as ``17``, ``0:100`` or ``6,special=drain,ranks=3``."""
    numbers, *fields = word.split(",")
    first, _, last = numbers.partition(":")
    return range(int(first), int(last or int(first) + 1)), parse(fields)


@dataclasses.dataclass
class Plan:
    """The faults of one launch.

    Attributes:
        dies: none, rank, courier, node or all.
        who: the rank, or a rank of the node.
        phase: the death comes after this has begun for the ``nth`` time: restoring or saving...
        point: ... when this crash point was then reached for the ``times``-th time, if there is one...
        after: ... after so many more scheduling points.
        others: mean number of scheduling points after which each other process dies, too; 0: at once.
        ends_s: the launcher ends the others after so many virtual seconds.
        second: scheduling points after which another rank dies; 0: none.
        wipes: nodes whose memory is lost afterwards, if the scheme covers that.
        stop: rank, scheduling point and seconds of a stopped process.
    """

    dies: str
    who: int
    phase: str = ""
    nth: int = 1
    point: str = ""
    times: int = 1
    after: int = 0
    others: int = 0
    ends_s: float = 0.3
    second: int = 0
    wipes: int = 0
    stop: tuple[int, int, float] | None = None


def draw_setting(random: Random, fixed: dict[str, object]) -> Setting:
    while True:
        ranks, per_node = random.choice(LAYOUTS)
        scheme = str(fixed.get("scheme") or random.choice(_SCHEMES))
        if ranks // per_node >= LEAST_NODES[scheme] and fixed.get("ranks", ranks) == ranks:
            break
    special = {random.choice(_SPECIAL) for _ in range(random.choice([0, 0, 1, 1, 2]))}
    setting = Setting(
        ranks, per_node, scheme, random.choice(["p2p", "rma"]), random.choice([3000, 9000, 20_000]), frozenset(special),
        random.choice(["comm", "mpi", "launcher"]), random.choice(["fast", "mixed", "mixed", "slow"]),
        random.random() < 0.3, random.choice(["wait", "wait", "skip"]), random.choice([0, 0, 0, 0.1, 0.3]),
        random.choice([0, 0, 0.1]), random.choice(["hdf5", "dcp"]),
        random.random() < 0.15, random.random() < 0.25, random.choice([2, 2, 3]),
    )  # fmt: skip
    setting = dataclasses.replace(setting, **fixed)  # type: ignore[arg-type]
    if "kept" in setting.special:
        setting = dataclasses.replace(setting, special=setting.special & {"kept", "common", "zeros"}, meets="launcher",
                                      no_space=0.0)  # fmt: skip
    if "disk" in setting.special:  # one that fails is left, and does not survive a power cut
        setting = dataclasses.replace(setting, bad_sync=0.0)
    return setting


def draw_plan(random: Random, setting: Setting, points: Iterable[str], saves: int, is_first: bool, is_lost: bool
              ) -> Plan:  # fmt: skip
    """Draw the faults of a launch: most deaths come inside of saves, restores and reprotections, many at crash points.

    Args:
        points: all crash points.
        saves: so many will follow.
        is_first: whether memory is empty: then nothing can be lost before the first commit.
        is_lost: whether something was lost that this launch must rebuild, fetch or reprotect.
    """
    dies = random.choices(["none", "rank", "node", "all", "courier"], [18, 30, 24, 14, 14])[0]
    plan = Plan(dies, random.randrange(setting.ranks), others=random.choice([0, 3, 30, 300, 3000]),
                ends_s=random.choice([0.01, 0.3, 2.0, 200.0]), wipes=random.choice([0, 1, 1, 1, 2]))  # fmt: skip
    if not saves or (not is_first and random.random() < (0.5 if is_lost else 0.25)):
        plan.phase = "restoring"
    else:
        plan.phase, plan.nth = "saving", random.randint(min(saves, 1 + is_first), saves)
    if random.random() < 0.5:
        plan.point = random.choice(_reached(points, setting, plan.phase, is_lost))
        plan.times = random.choice([1, 1, 1, 2, 4])
        plan.after = random.choice([0, 0, 1, 5])
    else:
        plan.after = int(math.exp(random.uniform(0, math.log(120 * setting.ranks))))
    if random.random() < 0.15:
        plan.second = int(math.exp(random.uniform(0, 7)))
    if setting.stops:
        plan.stop = (random.randrange(setting.ranks), int(10 ** random.uniform(1, 3.3)), 10 ** random.uniform(-4, 1.2))
    return plan


def _reached(points: Iterable[str], setting: Setting, phase: str, is_lost: bool) -> list[str]:
    """The crash points that a phase of this setting may reach."""
    moves = "transfer" if setting.scheme.startswith("copy") else "parity"
    if phase == "saving":
        kinds = {"stage", "protect", "commit", moves} | {_POINTS_OF.get(kind, "") for kind in setting.special}
        return [point for point in points if point.partition(".")[0] in kinds]
    kinds = {"restore", "reprotect"} | ({moves, "transfer"} if is_lost else set())
    left_out = set() if is_lost else _MADE_AGAIN
    left_out = left_out if "elastic" in setting.special else left_out | {"restore.resharded"}
    return [point for point in points if point.partition(".")[0] in kinds and point not in left_out]
