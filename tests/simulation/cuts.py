"""All crash cuts of one save: rank 0 has come to its i-th scheduling point, rank 1 to its j-th, and all die there.

    python tests/simulation/cuts.py --set scheme=copy transport=rma        all of them, on all cores
    python tests/simulation/cuts.py --set scheme=rs:2+1 --every 7          every seventh of each rank

What a crash leaves is decided by how far each rank has come, and by what was delivered, and not by the order in which
they came there. So these are all states that a crash of this save can leave. Then no node or one is lost, and the job
is started again. With three ranks, the third has come as far as its points say for the pair.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping

if os.environ.get("PYTHONHASHSEED") != "0":
    os.environ.update(PYTHONHASHSEED="0", OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

import machine

machine.install()

import couriers  # noqa: E402
import runner  # noqa: E402
from faults import LEAST_NODES, Plan, parse  # noqa: E402
from history import History, Launch  # noqa: E402
from scheduler import Task  # noqa: E402

_WAITS = {"test", "sleep", "queue.get", "event.wait", "poll", "socket.recv", "thread.join"}
_CUT_STEP, _ENOUGH_S = 2, 30.0  # virtual seconds, before anybody's deadline


class Cut(History):
    """Two saves; in the second one each rank is stopped at a point of its own.

    Args:
        cut: how many points each rank may pass in it; None: all.
        lost: the node whose memory is lost then; None: none is.
    """

    def __init__(self, fixed: Mapping[str, object], cut: tuple[int, ...] | None, lost: int | None):
        calm = {"launches": 1, "pace": "fast", "special": frozenset(), "stops": False, "flips": False, "no_space": 0.0,
                "per_node": 1, "nbytes": 9000, "has_errors": False, "when_busy": "wait"}  # fmt: skip
        super().__init__(1, {**calm, "ranks": LEAST_NODES[str(fixed["scheme"])], **fixed})
        self._cut, self._lost = cut, lost
        self.passed: Counter[int] = Counter()

    def draw_launch(self, number: int) -> Launch:
        is_last = number > 0
        return Launch(number, Plan("none", 0), 1 if is_last else _CUT_STEP, "all", is_last, limit_s=_ENOUGH_S)

    def at_point(self, task: Task, name: str) -> None:
        rank = task.process.rank
        has_begun = any((r.rank, r.event, r.step) == (rank, "saving", _CUT_STEP) for r in self.launch.records)
        if name in _WAITS or not has_begun:
            return
        self.passed[rank] += 1
        if self._cut is not None and self.passed[rank] > self._cut[rank]:
            self.launch.died = True
            for process in [*self.launch.trainers, *couriers.processes()]:
                if process.rank == rank:
                    process.stopped_until = 1e9

    def damage(self) -> None:
        if self._lost is not None:
            self.wipe(self._lost)


def run(fixed: Mapping[str, object], cut: tuple[int, ...] | None, lost: int | None) -> runner.Result:
    history = Cut(fixed, cut, lost)
    history.run()
    passed = [history.passed[rank] for rank in range(history.setting.ranks)]
    return {"cut": cut, "lost": lost, "problems": history.problems, "passed": passed}


def points(fixed: Mapping[str, object]) -> list[int]:
    """How many points each rank passes in a save."""
    (whole,) = runner.run_all([functools.partial(run, fixed, None, None)])
    if whole["problems"]:
        raise AssertionError(whole["problems"])
    passed: list[int] = whole["passed"]
    return passed


def cuts(passed: list[int], every: int) -> Iterator[tuple[tuple[int, ...], int | None]]:
    """The cuts, each with the node that is lost: all of them in turn, and none."""
    for number, (first, second) in enumerate(itertools.product(*(range(0, count + 1, every) for count in passed[:2]))):
        others = [(first * second + number) % (count + 1) for count in passed[2:]]
        yield (first, second, *others), (None, *range(len(passed)))[number % (len(passed) + 1)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", nargs="*", default=["scheme=copy"], metavar="FIELD=VALUE", help="see `python .`")
    parser.add_argument("--every", type=int, default=1, help="of the points of a rank")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    fixed = parse(args.set)
    runner.warm_up()
    passed = points(fixed)
    wanted = [functools.partial(run, fixed, *cut) for cut in cuts(passed, args.every)]
    failed, seen = 0, set()
    for result in runner.run_all(wanted, args.jobs):
        seen.add(tuple(map(min, result.get("cut", ()), result.get("passed", ()))))
        if result["problems"]:
            failed += 1
            print(f"--- cut {result.get('cut')}, lost node {result.get('lost')}", *result["problems"][:3], sep="\n")
    print(f"{' x '.join(map(str, passed))} points; {len(wanted)} cuts, {len(seen)} of them different; {failed} failed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
