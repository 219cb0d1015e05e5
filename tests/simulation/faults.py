"""What a seed draws: the setting of a history, and the faults of each of its launches."""

from __future__ import annotations

import dataclasses
import math
from random import Random

LEAST_NODES = {"copy": 2, "copy:2": 3, "xor:3": 3, "rs:2+1": 3, "rs:2+2": 4}
LAYOUTS = [(2, 1), (2, 1), (2, 1), (3, 1), (3, 1), (4, 1), (4, 2)]  # ranks, and ranks per node
_SPECIAL = ("drain", "lazy", "elastic", "values", "mend", "grow", "common", "zeros", "kept")


@dataclasses.dataclass
class Setting:
    """What is the same in all launches of a history, but for the number of ranks where it is elastic.

    Attributes:
        special: what this history is about, in addition to saves, kills and restores.
        no_space, bad_sync: probabilities that a file in memory gets no room, and that a drained file is not written.
        format: of drained files.
        courier: thread or process.
        pace: of messages; see `mpi.Network`.
        one_by_one: how many saves are waited for: all, some or none, but for the last.
    """

    ranks: int
    per_node: int
    scheme: str
    transport: str
    nbytes: int
    special: frozenset[str]
    courier: str
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


@dataclasses.dataclass
class Plan:
    """The faults of one launch.

    Attributes:
        dies: none, rank, courier, node or all.
        who: the rank, or a rank of the node.
        point: the death is when this crash point was reached for the ``nth`` time...
        phase: ... or so long after this event: restoring, saving or draining...
        after: ... after so many more scheduling points.
        others: mean number of scheduling points after which each other process dies, too; 0: at once.
        ends_s: the launcher ends the others after so many virtual seconds.
        second: scheduling points after which another rank dies; 0: none.
        wipes: nodes whose memory is lost afterwards, if the scheme covers that.
        stop: rank, scheduling point and seconds of a stopped process.
    """

    dies: str
    who: int
    point: str = ""
    nth: int = 1
    phase: str = ""
    after: int = 0
    others: int = 0
    ends_s: float = 0.3
    second: int = 0
    wipes: int = 0
    stop: tuple[int, int, float] | None = None


def draw_setting(random: Random, fixed: dict[str, object]) -> Setting:
    """Draw a setting; ``fixed`` has fields that are given."""
    while True:
        ranks, per_node = random.choice(LAYOUTS)
        scheme = str(fixed.get("scheme") or random.choice(["copy", "copy", "copy:2", "xor:3", "xor:3", "rs:2+1", "rs:2+2"]))
        if ranks // per_node >= LEAST_NODES[scheme] and fixed.get("ranks", ranks) == ranks:
            break
    special = {random.choice(_SPECIAL) for _ in range(random.choice([0, 0, 1, 1, 2]))}
    setting = Setting(
        ranks, per_node, scheme, random.choice(["p2p", "rma"]), random.choice([3000, 9000, 20_000]), frozenset(special),
        random.choice(["thread", "thread", "process"]), random.choice(["fast", "mixed", "mixed", "slow"]),
        random.random() < 0.3, random.choice(["wait", "wait", "skip"]), random.choice([0, 0, 0, 0, 0.1]),
        random.choice([0, 0, 0.1]), random.choice(["hdf5", "dcp"]),
        random.random() < 0.15, random.random() < 0.2, random.choice([1, 2, 2, 3]),
    )  # fmt: skip
    setting = dataclasses.replace(setting, **fixed)  # type: ignore[arg-type]
    if "kept" in setting.special:
        setting = dataclasses.replace(setting, special=setting.special & {"kept", "common", "zeros"}, courier="process",
                                      no_space=0.0)  # fmt: skip
    return setting


def draw_plan(random: Random, setting: Setting, points: list[str]) -> Plan:
    """Draw the faults of a launch; ``points`` are the crash points that it may reach."""
    dies = random.choices(["none", "rank", "node", "all", "courier"], [10, 35, 20, 20, 15])[0]
    plan = Plan(dies, random.randrange(setting.ranks), others=random.choice([0, 3, 30, 300, 3000]),
                ends_s=random.choice([0.01, 0.3, 2.0, 200.0]), wipes=random.choice([0, 0, 1, 1, 1, 2]))  # fmt: skip
    if random.random() < 0.45:
        plan.point, plan.nth = random.choice(points), random.choice([1, 1, 2, 3])
        plan.after = random.choice([0, 0, 1, 5])
    else:
        plan.phase = random.choice(["restoring", "saving", "saving", "saving"])
        plan.nth = random.choice([1, 2, 2, 3, 4]) if plan.phase == "saving" else 1
        plan.after = int(math.exp(random.uniform(0, math.log(120 * setting.ranks))))
    if random.random() < 0.15:
        plan.second = int(math.exp(random.uniform(0, 7)))
    if setting.stops:
        plan.stop = (random.randrange(setting.ranks), int(10 ** random.uniform(1, 3.3)), 10 ** random.uniform(-4, 1.2))
    return plan
