"""mlflash report: what it makes of event logs, with exact numbers; that no line of a file makes it fail."""

from __future__ import annotations

import html.parser
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import made_logs
import pytest
from click.testing import CliRunner, Result
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlflash.cli import main
from mlflash.human_readable.wording import many
from mlflash.log_report import advice, read_logs
from mlflash.log_report.advice import NODE_MTBF_S
from mlflash.log_report.curves import scale, thinned
from mlflash.log_report.formatting import lasted, ticks
from mlflash.log_report.job_history import JobHistory, tell, to_json
from mlflash.log_report.log_statistics import Point, spread
from mlflash.log_report.markup import tag
from mlflash.log_report.page import page
from mlflash.log_report.read_logs import File, files_of, read
from mlflash.log_report.timeline_rows import MOST_ROWS, rows

pytestmark = pytest.mark.slow  # a tool beside the engine

PLAN = {"ranks": 2, "redundancy": "copy", "survives": "any process; any 1 of 2 nodes", "transport": "p2p", "job": "j",
        "version": "0.1.0", "drain_every": 2}  # fmt: skip


def story_of(*paths: Path) -> JobHistory:
    return tell(read(files_of([str(path) for path in paths])))


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(event, separators=(",", ":")) + "\n" for event in events))
    return path


def say(event: str, time: float, rank: int, node: str, run: str = "a", **fields: Any) -> dict[str, Any]:
    return {"event": event, "time": time, "run": run, "rank": rank, "node": node, **fields}


def saved(step: int, called: float, nodes: list[str], run: str, generation: int = 0) -> list[dict[str, Any]]:
    """A save that stalls 0.5 s on rank 0 and 0.25 s on rank 1; committed after 3 s where it has a generation."""
    events = []
    for rank, node in enumerate(nodes):
        stall = 0.5 / (rank + 1)
        events.append(say("save", called + stall, rank, node, run, step=step, seconds=stall, nbytes=2000, lazy=False))
        if generation:
            events.append(
                say("protect", called + 2.5, rank, node, run, step=step, seconds=2.0, nbytes=2000, peers=[1 - rank])
            )
            events.append(say("commit", called + 3, rank, node, run, step=step, seconds=3.0, generation=generation))
    return events


@pytest.fixture
def lost_node(tmp_path: Path) -> Path:
    """Two ranks: steps 10 and 20 are committed, 30 is saved, n2 is lost; on n1 and n3 step 20 is restored."""
    before, after = ["n1", "n2"], ["n1", "n3"]
    events = [say("start", 1000.0, rank, node, nodes=before, **PLAN) for rank, node in enumerate(before)]
    events += [say("memory", 1000.0, rank, node, nbytes=8000) for rank, node in enumerate(before)]
    events += saved(10, 1010.0, before, "a", 1) + saved(20, 1020.5, before, "a", 2) + saved(30, 1031.0, before, "a")
    events += [say("start", 1061.5, rank, node, "b", nodes=after, **PLAN) for rank, node in enumerate(after)]
    events += [say("restore", 1071.5, rank, node, "b", step=20, seconds=4.0, nbytes=2000, source="memory",
                   **{"from": "n1"}) for rank, node in enumerate(after)]  # fmt: skip
    events += [say("memory", 1072.0, rank, node, "b", nbytes=9000 - rank) for rank, node in enumerate(after)]
    events += saved(30, 1081.5, after, "b", 3)
    events += [say("drain", 1084.75, rank, node, "b", step=30, seconds=0.25, nbytes=1500, path="/d/30", error=None)
               for rank, node in enumerate(after)]  # fmt: skip
    events += [say("end", 1085.0, rank, node, "b", state="ended") for rank, node in enumerate(after)]
    for node, name in ("n1", "run.jsonl"), ("n2", "run.node1.jsonl"), ("n3", "run.node2.jsonl"):
        write(tmp_path / name, [event for event in events if event["node"] == node])
    return tmp_path / "run.jsonl"


def test_the_time_of_a_job_that_lost_a_node_to_the_millisecond(lost_node: Path) -> None:
    told = to_json(story_of(lost_node))
    assert told["seconds"] == {
        "wall_s": 85.0, "kept_s": 33.0, "stall_s": 1.5, "lost_s": 10.5, "starting_s": 10.0,
        "recovering_s": 0.0, "down_s": 30.0,
    }  # fmt: skip
    assert told["goodput"] == 33 / 85
    assert (told["began"], told["ended"], told["state"]) == (1000.0, 1085.0, "ended")


def test_a_failure_says_what_was_lost_and_where_the_rest_was_found(lost_node: Path) -> None:
    told = to_json(story_of(lost_node))
    (failure,) = told["failures"]
    assert failure == {
        "launch": 0, "time": 1031.5, "state": "killed", "silent": [0, 1], "first_silent": [], "first_nodes": [],
        "gone": ["n2"], "new": ["n3"], "emptied": [], "newest": 30, "committed": 20, "restored": 20, "went_on": True,
        "source": "memory", "places": {"own node": 1, "memory of n1": 1}, "steps_lost": 10, "committed_lost": 0,
        "lost_s": 10.5, "down_s": 30.0, "recovery_s": 10.0,
    }  # fmt: skip
    assert (told["steps_lost"], told["committed_steps_lost"]) == (10, 0)
    assert "no committed step was lost" in page(story_of(lost_node))
    assert [(launch["state"], launch["restored"], launch["newest"]) for launch in told["launches"]] == [
        ("killed", None, 30), ("ended", 20, 30)]  # fmt: skip


def test_a_node_that_came_back_without_its_memory_is_named(tmp_path: Path) -> None:
    job = made_logs.Job(ranks_per_node=2)
    ended = job.launch("a", made_logs.BEGAN, ["n1", "n2"], None, 40, end=None)
    job.launch("b", ended + 60, ["n1", "n2"], 40, 60, places={2: "n1", 3: "parity"})
    job.write(tmp_path / "run.jsonl")
    (failure,) = story_of(tmp_path / "run.jsonl").failures
    assert (failure.emptied, failure.gone, failure.source) == (("n2",), (), "memory")
    assert failure.places == {"own node": 2, "memory of n1": 1, "parity": 1}
    assert "memory of n2" in page(story_of(tmp_path / "run.jsonl"))


def test_figures_of_saves_memory_and_drains(lost_node: Path) -> None:
    told = to_json(story_of(lost_node))
    assert told["stall_s"] == {"count": 4, "mean": 0.5, "median": 0.5, "p95": 0.5, "most": 0.5}
    assert told["commit_s"]["count"] == told["commits"] == 3 and told["commit_s"]["mean"] == 3.0
    assert told["protect_nbytes_per_s_and_rank"] == 1000.0
    assert told["newest"] == {"step": 30, "time": 1084.5, "seconds": 3.0, "generation": 3}
    assert told["memory"] == [
        {"node": "n1", "peak_nbytes": 9000, "last_nbytes": 9000},
        {"node": "n2", "peak_nbytes": 8000, "last_nbytes": 8000},
        {"node": "n3", "peak_nbytes": 8999, "last_nbytes": 8999},
    ]
    assert told["drains"] == {"count": 1, "failed": 0, "nbytes": 3000, "seconds": 0.25, "newest": 30, "path": "/d/30"}
    assert told["notes"] == [] and told["warnings"] == []


def test_ranks_that_commits_waited_for_are_listed_those_first_that_cost_most(tmp_path: Path) -> None:
    job = made_logs.Job(ranks_per_node=2)
    job.launch("a", made_logs.BEGAN, ["n1", "n2"], None, 60)
    late = {10: (3, "copy", 2.0), 20: (1, "training", 0.5), 30: (3, "copy", 3.0), 40: (3, "copy", 2.5),
            60: (3, "transfer", 0.25)}  # fmt: skip
    for line in job.lines["n1"]:
        if line["event"] == "commit" and line["rank"] == 0 and line["step"] in late:
            line |= dict(zip(("slowest", "late_in", "late_s"), late[line["step"]], strict=True))
    story = story_of(*job.write(tmp_path / "run.jsonl"))
    keys = ("rank", "node", "phase", "commits", "median_s", "most_s", "step")
    assert to_json(story)["waited_for"] == [dict(zip(keys, row, strict=True)) for row in (
        (3, "n2", "copy", 3, 2.5, 3.0, 40), (1, "n1", "training", 1, 0.5, 0.5, 20),
        (3, "n2", "transfer", 1, 0.25, 0.25, 60))]  # fmt: skip
    drawn = page(story)
    assert "Ranks that delayed commits" in drawn and "copied its state to its slot" in drawn and "3 of 6" in drawn
    plain = made_logs.Job()
    plain.launch("a", made_logs.BEGAN, ["n1", "n2"], None, 20)
    none = story_of(*plain.write(tmp_path / "other.jsonl"))
    assert to_json(none)["waited_for"] == [] and "Ranks that delayed commits" not in page(none)


def test_each_event_that_ranks_write_is_read() -> None:
    recorders = Path(__file__).parents[2] / "mlflash/telemetry/recorder.py"
    written = set(re.findall(r'events\.add\("([a-z]+)"', recorders.read_text()))
    assert len(written) > 15 and written <= set(read_logs._NEEDED)


def test_the_interval_comes_from_what_was_measured(lost_node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "_LONG_S", 60.0)
    interval = to_json(story_of(lost_node))["interval"]
    assert (interval["mtbf_s"], interval["failures"], interval["node_mtbf_s"]) == (85.0, 1, 0.0)
    assert (interval["stall_s"], interval["commit_s"], interval["restart_s"]) == (0.5, 3.0, 40.0)
    assert interval["young_s"] == pytest.approx((2 * 0.5 * 85) ** 0.5)
    assert (interval["now_s"], interval["step_s"]) == (10.5, 1.05)
    assert 0 < interval["best_waste"] <= interval["now_waste"] < 1


def test_a_failure_in_a_log_of_two_minutes_says_nothing_of_how_often_nodes_fail(lost_node: Path) -> None:
    story = story_of(lost_node)
    interval = to_json(story)["interval"]
    assert (interval["mtbf_s"], interval["failures"]) == (NODE_MTBF_S / 2, 0)
    assert interval["restart_s"] == 40.0, "that was measured all the same"
    said = f"1 failure in {lasted(story.account.wall_s)} is too few for an estimate, so this assumes that one node"
    assert said in page(story)


@pytest.mark.parametrize(("wall_s", "failed", "measured"), [
    (86_400, 1, True), (86_399, 4, False), (3600, 5, True), (3599, 50, False),
])  # fmt: skip
def test_a_rate_of_failures_needs_a_day_or_five_of_them_in_an_hour(wall_s: float, failed: int, measured: bool) -> None:
    assert advice.says_much(wall_s, failed) is measured


def test_without_a_failure_one_is_assumed_and_that_is_said(tmp_path: Path) -> None:
    job = made_logs.Job()
    job.launch("a", made_logs.BEGAN, ["n1", "n2"], None, 50)
    job.write(tmp_path / "run.jsonl")
    story = story_of(tmp_path / "run.jsonl")
    assert not story.failures and story.steps_lost == 0 and story.account.lost_s == 0
    assert story.advice.failures == 0 and story.advice.costs.mtbf_s == NODE_MTBF_S / 2
    assert "There was no failure, so this assumes that one node fails every 264 d" in page(story)
    given_ = tell(story.log, 3600.0)
    assert given_.advice.costs.mtbf_s == 1800.0


def test_a_job_that_begins_anew_has_lost_all_of_its_steps(tmp_path: Path) -> None:
    job = made_logs.Job()
    ended = job.launch("a", made_logs.BEGAN, ["n1", "n2"], None, 40, end=None)
    job.launch("b", ended + 60, ["n1", "n2"], None, 20)
    job.write(tmp_path / "run.jsonl")
    story = story_of(tmp_path / "run.jsonl")
    assert (story.failures[0].restored, story.steps_lost, story.committed_lost) == (None, 40, 40)
    assert story.account.lost_s == pytest.approx(story.launches[0].last - made_logs.BEGAN)
    assert "Training began from the start" in page(story)


def test_a_launch_that_dies_before_it_restored_loses_no_step_of_its_own(tmp_path: Path) -> None:
    job = made_logs.Job()
    ended = job.launch("a", made_logs.BEGAN, ["n1", "n2"], None, 40, end=None)
    job.launch("b", ended + 60, ["n1", "n2"], None, 0, end=None)
    job.launch("c", ended + 90, ["n1", "n2"], 40, 60)
    job.write(tmp_path / "run.jsonl")
    story = story_of(tmp_path / "run.jsonl")
    assert [(one.newest, one.restored, one.steps_lost) for one in story.failures] == [(40, 40, 0), (None, 40, 0)]
    assert story.account.starting_s == pytest.approx(2.5 + 5)  # of b up to its last sign, of c


def test_more_lost_than_the_redundancy_covers_is_said_first(tmp_path: Path) -> None:
    job = made_logs.Job()
    ended = job.launch("a", made_logs.BEGAN, ["n1", "n2"], None, 50, end=None)
    job.launch("b", ended + 60, ["n1", "n2"], 20, 60, source="/lustre/step-20")
    job.write(tmp_path / "run.jsonl")
    story = story_of(tmp_path / "run.jsonl")
    (failure,) = story.failures
    assert (failure.steps_lost, failure.committed_lost, failure.source) == (30, 30, "/lustre/step-20")
    assert failure.places == {"/lustre/step-20": 4} and failure.emptied == ("n1", "n2")
    assert "Training continued from the directory and lost 30 committed steps" in page(story)


def test_going_back_within_a_launch_loses_what_came_after(tmp_path: Path) -> None:
    nodes = ["n1", "n2"]
    events = [say("start", 0.0, rank, node, nodes=nodes, **PLAN) for rank, node in enumerate(nodes)]
    events += saved(10, 10.0, nodes, "a", 1) + saved(20, 20.0, nodes, "a", 2)
    events += [say("restore", 32.0, rank, node, step=10, seconds=2.0, nbytes=1, source="memory") for rank, node in
               enumerate(nodes)]  # fmt: skip
    events += saved(20, 42.0, nodes, "a", 3)
    events += [say("end", 45.0, rank, node, state="ended") for rank, node in enumerate(nodes)]
    story = story_of(write(tmp_path / "run.jsonl", events))
    assert not story.failures
    account = story.account  # kept: 0 to 10.5, 32 to 45; lost: 10.5 to 30; restoring: 30 to 32
    assert (account.kept_s, account.stall_s, account.lost_s, account.starting_s) == (22.5, 1.0, 19.5, 2.0)


@pytest.mark.parametrize(
    ("ends", "state", "failed", "silent"),
    [
        ({0: "ended", 1: "ended"}, "ended", 0, ()),
        ({0: "failed", 1: "failed"}, "failed", 1, ()),
        ({0: "failed"}, "killed", 1, (1,)),
        ({}, "open", 0, ()),
    ],
)
def test_how_the_newest_launch_ended(
    tmp_path: Path, ends: dict[int, str], state: str, failed: int, silent: tuple[int, ...]
) -> None:
    nodes = ["n1", "n2"]
    events = [say("start", 0.0, rank, node, nodes=nodes, **PLAN) for rank, node in enumerate(nodes)]
    events += saved(10, 10.0, nodes, "a", 1)
    events += [say("end", 14.0, rank, nodes[rank], state=how) for rank, how in ends.items()]
    story = story_of(write(tmp_path / "run.jsonl", events))
    assert (story.state, len(story.failures)) == (state, failed)
    assert [failure.first_silent for failure in story.failures] == [silent] * failed
    assert {"ended": "ended", "open": "running"}.get(state, "failed") in page(story)


def test_ranks_that_missed_a_save_of_the_others_went_first(tmp_path: Path) -> None:
    nodes = ["n1", "n2"]
    events = [say("start", 0.0, rank, node, nodes=nodes, **PLAN) for rank, node in enumerate(nodes)]
    events += saved(10, 10.0, nodes, "a", 1) + saved(20, 20.0, nodes[:1], "a")
    events += [say("warning", 25.0, 0, "n1", level="WARNING", text="waits for rank 1")]
    events += [say("start", 50.0, rank, node, "b", nodes=nodes, **PLAN) for rank, node in enumerate(nodes)]
    (failure,) = story_of(write(tmp_path / "run.jsonl", events)).failures
    assert (failure.first_silent, failure.first_nodes, failure.went_on) == ((1,), ("n2",), False)


def test_a_courier_that_goes_on_after_its_trainer_was_killed_is_no_sign_of_the_training(tmp_path: Path) -> None:
    nodes = ["n1", "n2"]
    events = [say("start", 0.0, rank, node, nodes=nodes, **PLAN) for rank, node in enumerate(nodes)]
    events += saved(10, 10.0, nodes, "a", 1)
    for rank, node in enumerate(nodes):
        events += [say("save", 20.5, rank, node, step=20, seconds=0.5, nbytes=2000, lazy=False)]
        late = [("protect", {"seconds": 9.0, "nbytes": 2000}), ("commit", {"seconds": 12.0, "generation": 2})]
        events += [say(kind, 32.0, rank, node, step=20, by="courier", **more) for kind, more in late]
    events += [say("warning", 33.0, 1, "n2", level="WARNING", text="the trainer is dead", by="courier")]
    events += [say("start", 50.0, rank, node, "b", nodes=nodes, **PLAN) for rank, node in enumerate(nodes)]
    story = story_of(write(tmp_path / "run.jsonl", events))
    (failure,) = story.failures
    assert (failure.time, failure.down_s, failure.first_silent, failure.committed) == (20.5, 29.5, (), 20)
    assert story.remarks[0].text == "the trainer is dead"
    assert [life.ended for row in rows(story.launches) for life in row.lives] == [20.5, 50.0, 20.5, 50.0]
    only = story_of(write(tmp_path / "run.jsonl", [one for one in events if one.get("by")]))
    assert only.ended == 33.0 and page(only)


def test_the_parts_of_the_time_add_up_whenever_a_job_is_killed(tmp_path: Path) -> None:
    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.tuples(st.floats(0.1, 200), st.integers(0, 8)), min_size=1, max_size=5))
    def check(launches: list[tuple[float, int]]) -> None:
        job = made_logs.Job()
        at, newest = made_logs.BEGAN, 0
        for number, (lasts, back) in enumerate(launches):
            step = max(0, newest - 10 * back) or None
            dies = dict.fromkeys(("n1", "n2"), at + lasts)
            job.launch(f"run{number}", at, ["n1", "n2"], step, 1000, dies=dies, end=None)
            heard = [line for lines in job.lines.values() for line in lines]
            newest = max((line["step"] for line in heard if line["event"] == "save"), default=0)
            at += lasts + 30
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            story = story_of(*job.write(Path(folder) / "run.jsonl"))
        account = story.account
        assert account.wall_s == pytest.approx(story.ended - story.began)
        assert min(account.kept_s, account.stall_s, account.lost_s, account.starting_s, account.down_s) >= 0
        assert 0 <= account.goodput <= 1
        assert len(story.failures) == len(launches) - 1

    check()


def test_lines_that_stop_in_the_middle_cost_nothing_of_the_next_launch(tmp_path: Path) -> None:
    start = json.dumps(say("start", 5.0, 0, "n1", nodes=["n1"], **PLAN), separators=(",", ":"))
    end = json.dumps(say("end", 9.0, 0, "n1", state="ended"), separators=(",", ":"))
    path = tmp_path / "run.jsonl"
    path.write_bytes((start + "\n" + start[:40] + start + "\nfoo\n[1]\n{}\n" + end + "\n" + end[:17]).encode())
    log = read([path])
    assert [event.kind for event in log.events] == ["start", "start", "end"]
    assert log.files == [File(str(path), lines=7, events=3, torn=2, foreign=3, first_foreign=3)]
    notes = tell(log).notes
    assert any("2 lines stopped in the middle" in note for note in notes)
    assert any(f"3 lines are not events (the first: {path}, line 3)" in note for note in notes)


@pytest.mark.parametrize(
    "change",
    [
        {"time": "now"}, {"time": None}, {"time": float("nan")}, {"time": -1}, {"time": 1e300}, {"time": True},
        {"rank": -1}, {"rank": 1.5}, {"rank": None}, {"rank": True}, {"node": 3}, {"run": None}, {"seconds": "1"},
        {"seconds": -1}, {"seconds": None}, {"seconds": float("inf")}, {"seconds": 10**400}, {"step": "10"},
        {"step": None}, {"nbytes": -1}, {"nbytes": 1.5},
        {"event": "unheard"}, {"event": ["save"]},
    ],
    ids=str,
)  # fmt: skip
def test_an_event_with_a_field_that_makes_no_sense_is_left_out(tmp_path: Path, change: dict[str, Any]) -> None:
    event = say("save", 5.0, 0, "n1", step=10, seconds=0.5, nbytes=100)
    path = write(tmp_path / "run.jsonl", [event, {**event, **change}])
    log = read([path])
    assert len(log.events) == 1 and (log.files[0].foreign, log.files[0].first_foreign) == (1, 2)
    assert log.unknown == ({"unheard": 1} if change.get("event") == "unheard" else {})


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.integers(0, 3), st.floats(0, 100),
    st.sampled_from(["n1", "n2", "a", "b", "memory"]), st.lists(st.text(max_size=3), max_size=3),
    st.sampled_from(["</script><script>alert(1)</script>", "\x00", "\ud800", "'\"><img src=x onerror=alert(1)>"]),
)  # fmt: skip
KINDS = ("start", "save", "skip", "fail", "protect", "commit", "restore", "heal", "damage", "mend", "drain", "memory",
         "warning", "end")  # fmt: skip
FIELDS = ("step", "seconds", "nbytes", "ranks", "nodes", "survives", "job", "source", "from", "why", "path", "error",
          "text", "level", "state", "generation", "redundancy", "slowest", "late_in", "late_s")  # fmt: skip
EVENTS = st.builds(
    lambda kind, time, rank, node, run, more: {
        **more,
        "event": kind,
        "time": time,
        "rank": rank,
        "node": node,
        "run": run,
    },
    st.sampled_from(KINDS),
    st.one_of(st.floats(0, 1000), st.floats(0, 2.5e11), VALUES),
    st.one_of(st.integers(0, 5), VALUES),
    st.one_of(st.sampled_from(["n1", "n2"]), VALUES),
    st.one_of(st.sampled_from(["a", "b"]), VALUES),
    st.dictionaries(st.sampled_from(FIELDS), VALUES),
)
GOOD_EVENTS = st.builds(
    lambda kind, time, rank, run, more, fields: {
        **more, "event": kind, "time": time, "rank": rank, "node": f"n{rank}", "run": run, "step": fields[0],
        "seconds": min(time, fields[1]), "nbytes": fields[2],
    },
    st.sampled_from(KINDS), st.floats(0, 2.5e11), st.integers(0, 3), st.sampled_from(["a", "b"]),
    st.dictionaries(st.sampled_from(["source", "from", "state", "generation", "error", "text", "slowest", "late_s",
                                     "late_in"]), VALUES),
    st.tuples(st.integers(-1, 2**63 - 1), st.floats(0, 1e11), st.integers(0, 2**63 - 1)),
)  # fmt: skip
JOURNAL = st.builds(
    lambda kind, more, time, seconds: {"time": time, "event": kind, "round": 2, "lost": [1, 0], "step": 3,
                                       "seconds": seconds, **({"rank": 1} if kind == "late" else {}), **more},
    st.sampled_from(["recovered", "recovered", "late", "start", "finish"]),
    st.dictionaries(st.sampled_from(["round", "lost", "why", "step", "times", "phase"]), VALUES, max_size=2),
    st.floats(0, 1000), st.floats(0, 100),
)  # fmt: skip
LINES = st.one_of(
    st.binary(max_size=60),
    st.one_of(EVENTS, GOOD_EVENTS, JOURNAL).map(lambda event: json.dumps(event, separators=(",", ":")).encode()),
    st.sampled_from([b'{"event":', b"[" * 5000, b"1" * 5000, b'{"event":"save","time":', b"\xff\xfe", b"\0" * 9]),
)


def test_whatever_is_in_the_files_nothing_is_raised(tmp_path: Path) -> None:
    @settings(max_examples=250, deadline=None)
    @given(st.lists(LINES, max_size=30), st.sampled_from([b"\n", b"\n", b"\n", b""]))
    @example([b'{"event":"start","time":0.0,"rank":0,"node":"%s","run":"a"}' % node for node in (b"", b"n0")], b"\n")
    @example([b'{"event":"%s","time":%s,"rank":%d,"node":"n%d","run":"b","step":0,"seconds":0.0,"nbytes":0}' % it
              for it in ((b"save", b"1.0", 0, 0), (b"commit", b"0.0", 1, 1))], b"\n")  # fmt: skip
    def check(lines: list[bytes], between: bytes) -> None:
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            path = Path(folder) / "run.jsonl"
            path.write_bytes(between.join(lines))
            log = read([path])
        (file,) = log.files
        assert file.events == len(log.events)
        assert file.events + file.journal + file.torn + file.foreign >= file.lines
        if log.events:
            story = tell(log)
            json.dumps(to_json(story))
            text = page(story)
            text.encode()
            assert "<script>alert" not in text and "<img" not in text

    check()


class Reader(html.parser.HTMLParser):
    """Checks that elements are closed in order, and collects what is in them."""

    ALONE = ("meta", "link", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.ALONE:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_what_stands_in_a_log_is_no_markup(tmp_path: Path) -> None:
    bad = "<script>alert('x')</script><b onclick=\"y\">&amp;"
    nodes = [bad, "n2"]
    events = [say("start", 0.0, rank, node, nodes=nodes, **{**PLAN, "job": bad, "survives": f"{bad}; {bad}"})
              for rank, node in enumerate(nodes)]  # fmt: skip
    events += saved(10, 10.0, nodes, "a", 1)
    events += [say("warning", 14.0, 0, bad, level=bad, text=bad), say("fail", 15.0, 0, bad, step=20, why=bad)]
    events += [say("drain", 15.0, 0, bad, step=10, seconds=1.0, nbytes=1, path=bad, error=None)]
    text = page(story_of(write(tmp_path / "run.jsonl", events)))
    reader = Reader(text)
    assert [attributes for tag, attributes in reader.seen if tag == "script"] == [{}]
    assert not [attributes for _, attributes in reader.seen if any(name.startswith("on") for name in attributes)]
    assert text.count("&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;") >= 6


def test_the_page_asks_nobody_for_anything(lost_node: Path) -> None:
    text = page(story_of(lost_node))
    reader = Reader(text)
    for tag_, attributes in reader.seen:
        for name in ("src", "href", "srcset", "data", "action", "poster"):
            assert attributes.get(name) in (None, "data:,"), (tag_, attributes)
    assert not re.search(r"url\((?!#)|@import|https?:", text)
    policies = [attributes["content"] for _, attributes in reader.seen if "http-equiv" in attributes]
    assert [str(policy).split(";")[0] for policy in policies] == ["default-src 'none'"]


def test_hundreds_of_ranks_and_tens_of_thousands_of_events_are_one_small_page(tmp_path: Path) -> None:
    paths = made_logs.large(tmp_path / "run.jsonl")
    assert len(paths) == 65
    story = story_of(paths[0])
    assert len(story.log.events) > 60_000 and story.launches[0].ranks == 512
    drawn = rows(story.launches)
    assert len(drawn) <= MOST_ROWS and sum(row.ranks for row in drawn) == 512 + 8
    assert [row.name for row in drawn if row.name in ("node032", "spare0")] == ["node032", "spare0"]
    text = page(story)
    assert len(text.encode()) < 2_000_000
    Reader(text)


def test_each_rank_has_a_row_on_each_of_its_nodes(tmp_path: Path) -> None:
    made_logs.eventful(tmp_path / "run.jsonl")
    drawn = rows(story_of(tmp_path / "run.jsonl").launches)
    assert [(row.node, row.name) for row in drawn] == [
        (f"n{node}", f"rank {rank}")
        for node, ranks in ((1, (0, 1)), (2, (2, 3)), (3, (4, 5)), (4, (6, 7)), (5, (4, 5))) for rank in ranks
    ]  # fmt: skip
    assert [len(row.lives) for row in drawn] == [3, 3, 3, 3, 1, 1, 3, 3, 2, 2]
    assert {mark.count for row in drawn for marks in row.marks.values() for mark in marks} == {1}


def test_missing_files_foreign_clocks_and_several_jobs_are_told(tmp_path: Path) -> None:
    job = made_logs.Job()
    job.launch("a", made_logs.BEGAN, ["n1", "n2"], None, 40)
    for line in job.lines["n2"]:
        line["time"] += 7.5
        line["job"] = "other"
    job.lines["n2"] = [line for line in job.lines["n2"] if line["rank"] == 2]
    job.write(tmp_path / "run.jsonl")
    notes = story_of(tmp_path / "run.jsonl").notes
    assert notes == [
        "launch 1: 1 of 4 ranks have no event: give the files of all nodes",
        "the commits show that the clock of n2 is 7.5 s ahead of that of n1",
    ]


def test_a_file_stands_for_those_of_the_other_nodes(tmp_path: Path) -> None:
    names = ["run.jsonl", "run.node1.jsonl", "run.node2.jsonl", "run.node10.jsonl"]
    for name in [*names, "run.nodes.jsonl", "run.node1x.jsonl", "other.jsonl", "run.node1.txt"]:
        (tmp_path / name).write_text("")
    given_ = [str(tmp_path / "run.jsonl"), str(tmp_path / "run.node2.jsonl"), f"{tmp_path}/./run.jsonl"]
    assert [path.name for path in files_of(given_)] == names


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["report", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_the_command_writes_the_page_and_prints_the_numbers(lost_node: Path, tmp_path: Path) -> None:
    output = tmp_path / "out" / "page.html"
    output.parent.mkdir()
    said = run(lost_node, "-o", output)
    assert said.stdout == f"{output}: 2 launches, 1 failure, goodput 38.8 %\n"
    assert output.read_text(encoding="utf-8") == page(story_of(lost_node))
    assert [path.name for path in output.parent.iterdir()] == ["page.html"]
    assert json.loads(run(lost_node, "--json").stdout) == to_json(story_of(lost_node))
    output.unlink()
    assert json.loads(run(lost_node, "--json", "-o", output).stdout) == to_json(story_of(lost_node))
    assert output.exists()
    assert json.loads(run(lost_node, "--json", "--mtbf", "30d").stdout)["interval"]["mtbf_s"] == 15 * 86400


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("no event\n")
    assert "no event in" in run(empty, "-o", tmp_path / "r.html", code=1).stderr
    assert "does not exist" in run(tmp_path / "missing.jsonl", code=2).stderr
    assert "a time such as" in run(empty, "--mtbf", "soon", code=2).stderr
    assert not (tmp_path / "r.html").exists()
    job = made_logs.Job()
    job.launch("a", made_logs.BEGAN, ["n1"], None, 10)
    job.write(tmp_path / "run.jsonl")
    assert "No such file" in run(tmp_path / "run.jsonl", "-o", tmp_path / "no" / "r.html", code=1).stderr


def test_small_things() -> None:
    assert spread([]).count == 0
    assert spread(range(1, 101)).p95 == 95 and spread([3.0]).p95 == 3.0
    assert tag("p", "a < b", tag("br"), class_="note", title=None) == '<p class="note">a &lt; b<br></p>'
    assert [lasted(s) for s in (0.25, 42, 3600, 3725, 90061)] == ["250 ms", "42 s", "1 h", "1 h 2 min", "1 d 1 h"]
    assert [many(1, "launch"), many(2, "launch"), many(1024, "rank")] == ["1 launch", "2 launches", "1,024 ranks"]
    assert ticks(0.0, 3600.0)[0] == 600 and ticks(10.0, 10.0)[1]
    few = [Point(float(i), i, 0, 1.0, 1.0, 1.0 + i) for i in range(3)]
    assert (scale(few).most, scale(few).logarithmic) == (3.0, False)
    far = [*few, Point(4.0, 4, 0, 1.0, 1.0, 90.0)]
    assert (scale(far).least, scale(far).most, scale(far).logarithmic) == (1.0, 100.0, True)
    assert len(thinned([Point(float(i), i, i // 500, 0, 0, 0) for i in range(1000)])) <= 242
