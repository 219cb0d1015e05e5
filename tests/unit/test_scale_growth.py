"""What grows with a job, counted on simulated ranks: nothing per rank but what has a reason, and that linearly."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from scale import growth, paths
from scale.growth import LINEAR, Series

pytestmark = pytest.mark.slow  # a tool beside the engine

RANKS = (256, 1024)


@pytest.fixture(scope="module")
def rows() -> list[paths.Row]:
    return [row for ranks in RANKS for row in paths.measure(ranks)]


def test_no_way_of_a_checkpoint_grows_faster_than_it_may(rows: list[paths.Row]) -> None:
    assert [row.path for row in rows[: len(paths.PATHS)]] == [row.path for row in rows[len(paths.PATHS) :]]
    assert {row.path for row in rows} == set(paths.PATHS)
    assert not [row.wrong for row in rows if row.wrong]
    assert not [one.wrong for one in growth.of_counts(rows) if one.wrong]


def test_what_may_grow_is_there_and_does(rows: list[paths.Row]) -> None:
    found = {one.what: one.exponent for one in growth.of_counts(rows) if one.why}
    assert set(found) == {f"{path}: {growth.COUNTS[name]}" for path, name in LINEAR}
    assert all(exponent > 0.5 for exponent in found.values())


@pytest.mark.parametrize("path", paths.PATHS)
def test_a_rank_is_told_few_bytes_of_each_other(path: str, rows: list[paths.Row]) -> None:
    few, many = paths.of_path(rows, path)
    more = (many.rank_nbytes - few.rank_nbytes) / (many.ranks - few.ranks)
    assert more <= {paths.START: 48, paths.COMMIT: 0, paths.DRAIN: 180, paths.RESHARD: 200}.get(path, 48)


def test_rank_0_looks_for_each_drained_file_once(rows: list[paths.Row]) -> None:
    for row in paths.of_path(rows, paths.DRAIN):
        assert (row.files, row.requests) == (1, 1), "a rank writes its file"
        assert row.first_files == 4, "its own, the provenance, the verdict, the last one"
        assert row.first_requests <= row.ranks + 9


def test_a_restore_asks_for_what_it_needs(rows: list[paths.Row]) -> None:
    for row in paths.of_path(rows, paths.OUT_OF_DIRECTORY):
        assert (row.files, row.requests) == (1, 4), "size, card, index and content of its own file"
    for row in rows:
        assert row.path in (paths.DRAIN, paths.OUT_OF_DIRECTORY, paths.RESHARD_OUT_OF_DIRECTORY) or not row.files


@pytest.mark.parametrize("name", growth.COUNTS)
@pytest.mark.parametrize("path", (paths.COMMIT, paths.DRAIN, paths.RESHARD))
def test_what_grows_faster_is_found(path: str, name: str, rows: list[paths.Row]) -> None:
    """One more for each eight ranks, or where linear growth has a reason for each pair of them."""
    more = {ranks: ranks**2 if (path, name) in LINEAR else ranks // 8 for ranks in RANKS}
    those = paths.of_path(rows, path)
    worse = [dataclasses.replace(row, **{name: getattr(row, name) + more[row.ranks]}) for row in those]
    if name != "sent_nbytes":  # of which there are millions
        assert [one.wrong for one in growth.of_counts(worse) if one.wrong]


def test_exponents_of_known_series() -> None:
    squares = Series("squares", ((10, 100.0), (100, 10_000.0), (1000, 1_000_000.0)))
    assert squares.exponent == pytest.approx(2.0) and "logarithm" in squares.wrong
    assert "exponent 2.00" in dataclasses.replace(squares, most=1.05).wrong
    assert Series("none", ((10, 0.0), (100, 0.0))).exponent == 0.0
    assert not Series("as a logarithm", ((16, 4.0), (256, 8.0))).wrong
    assert Series("a little more", ((16, 4.0), (256, 9.0))).wrong
    assert Series("new", ((16, 0.0), (256, 1.0))).wrong and Series("one size", ((16, 7.0),)).wrong == ""
