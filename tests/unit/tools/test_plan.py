"""`mlflash plan`: formulas against published numbers and simulation, chances against trying each, the command."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from mlflash import Checkpointer
from mlflash.cli import main
from mlflash.placement.redundancy import parse, place
from mlflash.placement.survival import of
from mlflash.text import read_bytes, read_seconds, show_bytes, show_seconds
from mlflash.tools.plan import SCHEMES, Costs, Job, node_nbytes, scheme_costs, share_uncovered, waste

pytestmark = pytest.mark.slow  # a tool beside the engine

DOC = (Path(__file__).parents[3] / "docs" / "plan.md").read_text()
GIB = 1 << 30
FAILURES = ("--mtbf", "264d", "--save", "0.3s", "--commit", "8s", "--restart", "90s")


def job(nodes: int, ranks_per_node: int = 2, **given: Any) -> Job:
    return Job(tuple(f"n{node}" for node in range(nodes)), ranks_per_node, given.pop("nbytes", GIB), **given)


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["plan", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def plan(*arguments: object) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(run(*arguments, "--json"))
    return document


# How often to save


@pytest.mark.parametrize(("interval", "uncovered"), [(100.0, 0.0), (100.0, 0.1), (300.0, 0.3)])
def test_the_waste_is_that_of_a_simulated_job(interval: float, uncovered: float) -> None:
    # A failure every 1000 s: many fall into restarts and repeated work.
    costs = Costs(1000.0, 4.0, 20.0, 60.0, 2000.0, 200.0)
    assert costs.drain_every_s is not None
    rng = random.Random(1)
    now = done = drained = 0.0
    next_drain = costs.drain_every_s

    def gained(seconds: float) -> float:
        """Steps committed after so many seconds of training, as seconds of computation."""
        return max(0, (seconds + costs.stall_s - costs.commit_s) // interval) * (interval - costs.stall_s)

    for _ in range(200_000):
        up = rng.expovariate(1 / costs.mtbf_s)
        while now + up > next_drain:
            drained = done + gained(next_drain - now)
            next_drain += costs.drain_every_s
        now, done, fell, back = now + up, done + gained(up), False, False
        while not back:
            fell = fell or rng.random() < uncovered
            restart, up = costs.pfs_restart_s if fell else costs.restart_s, rng.expovariate(1 / costs.mtbf_s)
            now, back = now + min(up, restart), up >= restart
        if fell:
            done, next_drain = drained, now + costs.drain_every_s
    assert waste(interval, costs, uncovered) == pytest.approx(1 - done / now, rel=0.02)


# What a scheme gives


@given(
    scheme=st.sampled_from(["none", "copy", "copy:2", "xor:3", "xor:4", "rs:2+2", "rs:3+2"]), nodes=st.integers(4, 9)
)
def test_chances_and_the_share_that_memory_cannot_give_back_are_those_of_trying_each_loss(
    scheme: str, nodes: int
) -> None:
    here = job(nodes, 1)
    placed = place(here.topology, parse(scheme))
    survived = of(here.topology, placed)
    tried = [1.0, *(
        sum(map(survived.survives, itertools.combinations(range(nodes), lost))) / math.comb(nodes, lost)
        for lost in range(1, nodes + 1)
    )]  # fmt: skip
    assert scheme_costs(here, parse(scheme), placed, 4, None).chances == {n: tried[n] for n in (1, 2, 3, 4)}
    mean = (nodes - 1) * 60 / 1000
    expected = sum(math.exp(-mean) * mean**further / math.factorial(further)
                   * (1 - (tried[further + 1] if further < nodes else 0)) for further in range(60))  # fmt: skip
    assert share_uncovered(survived, 1000, 60) == pytest.approx(expected, rel=1e-9)
    assert share_uncovered(survived, 1000, 0) == (1.0 if scheme == "none" else 0.0)
    assert share_uncovered(survived, 1e-6, 60) == pytest.approx(1.0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_memory_is_the_overhead_of_the_scheme_and_headers(scheme: str) -> None:
    here, draining = (job(8 * 10 * 11, nbytes=12 * GIB, own_slots=slots) for slots in (2, 3))  # divides into all groups
    placed = place(here.topology, parse(scheme))
    expected = 2 * (1 + parse(scheme).overhead) * here.state_nbytes
    assert expected < node_nbytes(here, placed) < 1.001 * expected
    assert here.state_nbytes < node_nbytes(draining, placed) - node_nbytes(here, placed) < 1.001 * here.state_nbytes
    two, three = re.findall(rf"^\| {re.escape(scheme)} \| ([\d.]+) \| ([\d.]+) \|$", DOC, re.M)[0]
    assert (two, three) == (f"{expected / here.state_nbytes:.2f}", f"{expected / here.state_nbytes + 1:.2f}")
    half = job(16, nbytes=12 * GIB, alike_nbytes=6 * GIB)
    own = 2 * (1 + parse(scheme).overhead) * half.ranks_per_node * 6 * GIB
    if scheme in ("none", "copy", "rs:6+2"):  # they divide 16 nodes
        assert node_nbytes(half, place(half.topology, parse(scheme))) == pytest.approx(own + 2 * 6 * GIB, rel=0.001)


# What people write and read


def test_quantities_are_read_and_written_short() -> None:
    assert [read_bytes(text) for text in ("12GiB", "80GB", "1.5 MiB", "512", "3kB")] == [
        12 << 30, 80 * 10**9, 3 << 19, 512, 3000,
    ]  # fmt: skip
    assert [read_seconds(text) for text in ("0.3", "250ms", "2min", "30000h", "1e3 s", "2y")] == pytest.approx(
        [0.3, 0.25, 120, 1.08e8, 1000, 63_115_200]
    )
    assert [show_bytes(n) for n in (0, 1023, 12 << 30, 1_500_000, 5 << 50)] == [
        "0 B", "1023 B", "12 GiB", "1.4 MiB", "5 PiB",
    ]  # fmt: skip
    assert [show_seconds(s) for s in (0.0005, 0.3, 1, 93, 150, 5400, 40_000, 4e5, 1e9)] == [
        "0.5 ms", "300 ms", "1 s", "93 s", "2.5 min", "1.5 h", "11 h", "4.6 d", "32 y",
    ]  # fmt: skip


# The command


def test_the_examples_of_the_page_are_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```console\n\$ (.*)\n([^`]*)```", DOC, re.M)
    assert len(blocks) == 2
    for command, shown in blocks:
        program, *arguments = shlex.split(command)
        if program == "cat":
            Path(arguments[0]).write_text(shown)
        else:
            assert CliRunner().invoke(main, arguments).output == shown


def test_a_kind_of_node_gives_ranks_memory_and_what_is_left() -> None:
    given = ("--node", "gb200-tray", "--nodes", 2, "--bytes", "50GB", "--scheme", "copy")
    in_memory, on_disk = plan(*given)["schemes"][0], plan(*given, "--on-disk")["schemes"][0]
    assert (in_memory["fits"], on_disk["fits"]) == (False, True)
    assert in_memory["memory_nbytes"] // 10**9 == 4 * 4 * 50 and on_disk["memory_nbytes"] // 10**9 == 4 * 2 * 50
    assert "521.5 GiB" in run(*given, "--on-disk")  # of 960 GB


def test_json_has_what_the_table_has() -> None:
    document = plan("--nodes", 64, "--bytes", "12GiB", "--memory", "300GiB", *FAILURES)
    asked = {"ranks_per_node": 8, "nbytes": 12 * GIB, "memory_nbytes": 300 * GIB, "alike_nbytes": 0, "own_slots": 2}
    assert document["job"].items() >= asked.items() and len(document["job"]["node_names"]) == 64
    assert document["failures"]["mtbf_s"] == pytest.approx(264 * 86_400 / 64)
    schemes = {scheme["scheme"]: scheme for scheme in document["schemes"]}
    assert list(schemes) == list(SCHEMES)
    rs = schemes["rs:6+2"]
    assert rs["survives"].startswith("any process; any 2 of 64 nodes; 41,216 of 41,664 triples")
    assert rs["chances"] == {"1": 1.0, "2": 1.0, "3": 41_216 / 41_664}
    assert (rs["any_nodes"], rs["fits"], schemes["copy"]["fits"]) == (2, True, False)
    assert rs["memory_per_state"] == pytest.approx(8 / 3, rel=1e-3)
    assert rs["interval_s"] == pytest.approx(math.sqrt(2 * 0.3 * 264 * 86_400 / 64), rel=0.01)
    assert 0.001 < rs["waste"] < 0.002 and 0 < rs["falls_per_year"] < 1e-4
    assert schemes["none"]["interval_s"] is None and schemes["none"]["waste"] is None
    assert schemes["none"]["falls_per_year"] == pytest.approx(64 * 365.25 / 264)
    assert document["least_memory"] == {"any 1 node": "xor:8", "any 2 nodes": "rs:8+2", "any 3 nodes": "rs:8+3"}
    few = plan("--nodes", 3, "--bytes", "1GiB", "--losses", 9)
    assert [scheme["scheme"] for scheme in few["schemes"]] == ["none", "copy", "copy:2", "xor:4"]
    assert few["failures"] is None and [*few["schemes"][0]["chances"]] == ["1", "2", "3"]
    assert few["notes"][0] == "xor:8 is left out: it makes xor:3 here, as xor:4 does"
    some = plan("--nodes", 3, "--bytes", "1GiB", "--scheme", "rs:6+2", "--scheme", "copy:2")["schemes"]
    assert [(scheme["scheme"], scheme["made"]) for scheme in some] == [("rs:6+2", "copy:2"), ("copy:2", "copy:2")]


def test_a_report_of_a_run_says_what_was_measured(shm: Path, tmp_path: Path) -> None:
    with Checkpointer(memory=str(shm), job="j", redundancy="none") as ckpt:
        for step in range(3):
            ckpt.save(step, {"w": np.zeros(3_000_000, np.uint8)}).wait()
        report = ckpt.report()
    file, own, seconds = tmp_path / "report.json", report["slots"][0]["nbytes"], report["seconds"]
    file.write_text(json.dumps(report))
    document = plan("--report", file, "--nodes", 4, "--mtbf", "1y")
    assert 3_000_000 < document["job"]["nbytes"] == own < 3_100_000
    assert document["failures"]["stall_s"] == pytest.approx(seconds["stall"] / 3)
    assert document["failures"]["commit_s"] == pytest.approx((seconds["stall"] + seconds["protect and commit"]) / 3)
    file.write_text(json.dumps([report, report, {**report, "node": "other"}]))
    document = plan("--report", file, "--bytes", "1GB", "--mtbf", "1y", "--save", "2s")
    assert (len(document["job"]["node_names"]), document["job"]["ranks_per_node"]) == (2, 2)
    assert (document["job"]["nbytes"], document["failures"]["stall_s"]) == (10**9, 2)
    shares = [{"what": "share", "nbytes": nbytes} for nbytes in (10**6, 10**6)]
    sharing = {**report, "slots": [*report["slots"], *shares], "shared with": [0, 1]}
    file.write_text(json.dumps([sharing, sharing]))
    document = plan("--report", file, "--mtbf", "1y")
    assert (document["job"]["alike_nbytes"], document["job"]["nbytes"]) == (2 * 10**6, own + 2 * 10**6)
    file.write_text(json.dumps(sharing))
    assert "those of all 2 ranks" in run("--report", file, "--nodes", 4, code=1)
    for text, wrong in (("{}", "is not a report"), ("{", "is not a report"), ('[{"node": 1}]', "is not a report"),
                        ("[]", "saved nothing"), (json.dumps({**report, "counts": {}}), "saved nothing")):  # fmt: skip
        file.write_text(text)
        assert wrong in run("--report", file, "--nodes", 4, code=1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--nodes 4", "Give --bytes or --report"),
        ("--bytes 1GiB", "Give --nodes, --hosts, --domains"),
        ("--nodes 4 --bytes 1GiB --gradients 1GiB", "--gradients is for --light N"),
        ("--nodes 4 --bytes 12G", "bytes such as 12GiB"),
        ("--nodes 4 --bytes 0B", "at least 1 byte"),
        ("--nodes 4 --bytes 1GiB --alike 2GiB", "is larger than the state of a rank"),
        ("--nodes 4000000 --bytes 1GiB", "1 to 1,048,576 ranks"),
        ("--nodes 4 --bytes 1GiB --scheme raid", "none, copy, copy:k, xor:n"),
        ("--nodes 4 --bytes 1GiB --mtbf 5y", "needs --save"),
        ("--nodes 4 --bytes 1GiB --mtbf 0 --save 1", "longer than 0 s"),
        ("--nodes 4 --bytes 1GiB --mtbf 5y --save 2 --commit 1", "cannot be shorter than --save"),
        ("--nodes 4 --bytes 1GiB --mtbf 5y --save 2 --pfs-restart 1h", "needs --drain-every"),
        ("--nodes 4 --hosts n[1-3] --bytes 1GiB", "4 different hosts"),
        ("--hosts n1,n1 --bytes 1GiB", "different hosts"),
        ("--domains /no/such --bytes 1GiB", "does not exist"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_is_possible(arguments: str, text: str) -> None:
    result = CliRunner().invoke(main, ["plan", *arguments.split()])
    assert result.exit_code in (1, 2)
    assert text in " ".join(result.output.split()), result.output
