"""How planning, agreement, inventory and restore grow with the job, and what that means for 1,000 to 100,000 GPUs.

    python benchmarks/scale/run.py [--ranks N ...] [--samples 20000] [--seed 1] [--quick] [--json FILE] [--plot FILE]

It needs no MPI. It runs the code of one rank on the tables and messages of 1,024 to 131,072 ranks, 8 on a node. It also
computes a model of machines whose parameters are measured here or published. It exits with 1 if numbers contradict each
other, if something grows too fast, or if a commit takes too many allreduces. README.md in this folder has formulas,
sources and results.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.question import begin, finish, parser_of  # noqa: E402
from scale import agreement, drain_commit, forecast, growth, kernels, old_ranks, paths, planning, rows  # noqa: E402
from scale.parameters import Node  # noqa: E402

QUICK = (256, 1024)  # job sizes from which a quick run computes growth
LEAVES, LEARNT_LEAVES = 2, 300  # leaves of a rank: where a drain is committed; where a rank learns about old ranks


def main() -> int:
    args = arguments()
    logging.getLogger("mlflash").setLevel(logging.ERROR)
    begun = begin(args)
    plans = [planning.measure(ranks, scheme, args.samples, args.seed)
             for ranks in args.ranks for scheme in planning.SCHEMES]  # fmt: skip
    few = [ranks for ranks in args.ranks if not args.quick or ranks == args.ranks[0]]
    measured = [agreement.measure(ranks, *job) for ranks in few for job in agreement.JOBS]
    jobs = [row for row in measured if row is not None]
    sizes = QUICK if args.quick else sorted(args.ranks)
    ways = [row for ranks in sizes for row in paths.measure(ranks)]
    commits = [drain_commit.measure(ranks, "hdf5", LEAVES) for ranks in sizes]
    learnt = {ranks: old_ranks.learn(ranks, LEARNT_LEAVES) for ranks in sizes}
    grown = [*growth.of_counts(ways), *growth.of_seconds(ways), *growth.of_commits(commits), *growth.of_learnt(learnt),
             *growth.of_jobs(jobs), *growth.of_plans(plans)]  # fmt: skip
    points = list(forecast.points(Node(), gpus=forecast.FEW if args.quick else forecast.GPUS))
    found = [*rows.of_plans(plans), *rows.of_jobs(jobs), *rows.of_paths(ways), *rows.of_commits(commits),
             *rows.of_growth(grown), *rows.of_rates(kernels.measure()), *rows.of_points(points)]  # fmt: skip
    of_both: list[planning.Row | agreement.Row] = [*plans, *jobs]
    wrong = [f"{row.ranks:,} ranks, {row.scheme}: {row.wrong}" for row in of_both if row.wrong]
    wrong += [f"{way.ranks:,} ranks, {way.path}: {way.wrong}" for way in ways if way.wrong]
    wrong += [f"{one.ranks:,} ranks, {one.form}: {one.wrong}" for one in commits if one.wrong]
    wrong += [one.wrong for one in grown if one.wrong]
    return finish(args, begun, {}, found, wrong, lambda path: draw(path, plans, jobs, points, grown))


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, timeout_s=None, repetitions=None)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=planning.RANKS, help="numbers of ranks, multiples of 64"
    )
    parser.add_argument("--samples", type=int, default=20_000, help="number of random losses of nodes")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random losses")
    args = parser.parse_args()
    if any(ranks < 128 or ranks % 64 for ranks in args.ranks):
        parser.error("--ranks must be multiples of 64, at least 128")
    if args.quick:
        args.ranks, args.samples = (1024, planning.AIMED_RANKS), 2000
    return args


def draw(path: Path, plans: list[planning.Row], jobs: list[agreement.Row], points: list[forecast.Point],
         grown: list[growth.Series]) -> None:  # fmt: skip
    """Draw ranks to the path, and the model, and growth if there are three sizes or more, in the same folder."""
    from scale import plots

    plots.draw_ranks(path, plans, jobs)
    if len({ranks for one in grown for ranks, _ in one.points}) > 2:
        plots.draw_growth(path.with_name("plot-growth.svg"), grown)
    plots.draw_model(path.with_name("plot-model.svg"), points)
    plots.draw_waste(path.with_name("plot-waste.svg"), points)


if __name__ == "__main__":
    sys.exit(main())
