"""mlflash report: the numbers that it makes of event logs, exactly, and a page that any log may fill."""

from __future__ import annotations

import html.parser
import json
import re
import tempfile
import typing
from pathlib import Path
from typing import Any

import made_logs
import pytest
from click.testing import CliRunner, Result
from hypothesis import example, given, settings
from hypothesis import strategies as st

import mlflash
from mlflash.cli import main
from mlflash.launch.cause import Cause
from mlflash.tools.report_log import _JOURNAL_KINDS, EventKind, Recovered

pytestmark = pytest.mark.slow  # a tool beside the engine

PLAN = {"ranks": 2, "redundancy": "copy", "survives": "any process; any 1 of 2 nodes", "transport": "p2p", "job": "j",
        "version": "0.1.0", "drain_every": 2}  # fmt: skip
NODES = ["n1", "n2"]
ROW = r'<div title="([^"]+)">'
TIMES = {"leave": 0.25, "wait": 0.5, "couriers": 0.75, "checkpointer": 0.125, "groups": 0.25, "restore": 1.5}


def report(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["report", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def numbers(*logs: object) -> Any:
    return json.loads(report(*logs, "--json").stdout)


def page(*logs: Path) -> str:
    """The text of the page, which is well-formed and names nothing that a browser would load."""
    path = logs[0].with_suffix(".html")
    report(*logs, "-o", path)
    text = path.read_text(encoding="utf-8")
    Reader(text)
    return text


class Reader(html.parser.HTMLParser):
    """Check that elements are closed in order, and that there is no script, picture, address or handler of events."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "img", "iframe") and not any(name.startswith("on") for name, _ in attrs)
        assert {value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")} <= {"data:,"}
        if tag not in ("meta", "link", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(event, separators=(",", ":")) + "\n" for event in events))
    return path


def say(event: str, time: float, rank: int, node: str, run: str = "a", **fields: Any) -> dict[str, Any]:
    return {"event": event, "time": time, "run": run, "rank": rank, "node": node, **fields}


def starts(time: float, run: str = "a") -> list[dict[str, Any]]:
    return [say("start", time, rank, node, run, nodes=NODES, **PLAN) for rank, node in enumerate(NODES)]


def saved(step: int, called: float, nodes: list[str], run: str, generation: int = 0, peers: bool = True
          ) -> list[dict[str, Any]]:  # fmt: skip
    """A save that stalls 0.5 s on rank 0 and 0.25 s on rank 1; committed after 3 s if it has a generation."""
    events = []
    for rank, node in enumerate(nodes):
        stall = 0.5 / (rank + 1)
        events.append(say("save", called + stall, rank, node, run, step=step, seconds=stall, nbytes=2000, lazy=False))
        if generation:
            events.append(say("protect", called + 2.5, rank, node, run, step=step, seconds=2.0, nbytes=2000,
                              peers=[1 - rank] * peers))  # fmt: skip
            events.append(say("commit", called + 3, rank, node, run, step=step, seconds=3.0, generation=generation))
    return events


@pytest.fixture
def lost_node(tmp_path: Path) -> Path:
    """Two ranks: steps 10 and 20 are committed, 30 is saved, n2 is lost; on n1 and n3 step 20 is restored."""
    before, after = ["n1", "n2"], ["n1", "n3"]
    events = starts(1000.0)
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


def test_the_numbers_of_a_job_that_lost_a_node(lost_node: Path) -> None:
    stats = numbers(lost_node)
    assert stats["seconds"] == {
        "wall_s": 85.0, "kept_s": 33.0, "stall_s": 1.5, "lost_s": 10.5, "starting_s": 10.0,
        "recovering_s": 0.0, "down_s": 30.0,
    }  # fmt: skip
    assert stats["goodput"] == 33 / 85
    assert (stats["began"], stats["ended"], stats["state"]) == (1000.0, 1085.0, "ended")
    assert stats["failures"] == [{
        "launch": 0, "time": 1031.5, "state": "killed", "silent": [0, 1], "first_silent": [], "first_nodes": [],
        "gone": ["n2"], "new": ["n3"], "emptied": [], "newest": 30, "committed": 20, "restored": 20, "went_on": True,
        "source": "memory", "places": {"own node": 1, "memory of n1": 1}, "steps_lost": 10, "committed_lost": 0,
        "lost_s": 10.5, "down_s": 30.0, "recovery_s": 10.0, "kind": "", "why": "", "evidence": "",
    }]  # fmt: skip
    assert (stats["steps_lost"], stats["committed_steps_lost"]) == (10, 0)
    assert [(launch["state"], launch["restored"], launch["newest"]) for launch in stats["launches"]] == [
        ("killed", None, 30), ("ended", 20, 30)]  # fmt: skip
    assert stats["stall_s"] == {"count": 4, "mean": 0.5, "median": 0.5, "p95": 0.5, "most": 0.5}
    assert stats["commit_s"]["count"] == stats["commits"] == 3 and stats["commit_s"]["mean"] == 3.0
    assert stats["protect_nbytes_per_s_and_rank"] == 1000.0
    assert stats["newest"] == {"step": 30, "time": 1084.5, "seconds": 3.0, "generation": 3}
    assert stats["memory"] == [
        {"node": "n1", "peak_nbytes": 9000, "last_nbytes": 9000},
        {"node": "n2", "peak_nbytes": 8000, "last_nbytes": 8000},
        {"node": "n3", "peak_nbytes": 8999, "last_nbytes": 8999},
    ]
    assert stats["drains"] == {"count": 1, "failed": 0, "nbytes": 3000, "seconds": 0.25, "newest": 30, "path": "/d/30"}
    assert stats["notes"] == [] and stats["warnings"] == []
    assert [file["events"] for file in stats["files"]] == [17, 9, 8] and stats["files"][0]["path"] == str(lost_node)


def test_the_page_has_the_numbers_and_loads_nothing(lost_node: Path) -> None:
    text = page(lost_node)
    for words in ("38.8 %", "No committed step was lost.", "1000 B/s", "step 30", "n2", "n3", "own node: 1"):
        assert words in text, words
    assert "default-src &#39;none&#39;" in text or "default-src 'none'" in text
    assert not re.search(r"url\(|@import|https?:", text)


def test_a_job_without_peers_was_not_protected_and_its_page_does_not_say_so(tmp_path: Path) -> None:
    log = write(tmp_path / "run.jsonl", starts(0.0) + saved(10, 10.0, NODES, "a", 1, peers=False))
    assert numbers(log)["protect_nbytes_per_s_and_rank"] == 0.0
    assert "protect" not in re.sub(r"(?s)<style>.*</style>", "", page(log)).lower()


def test_a_node_that_came_back_without_its_memory_is_named(tmp_path: Path) -> None:
    job = made_logs.Job()
    ended = job.launch("a", made_logs.BEGAN, NODES, None, 40, end=None)
    job.launch("b", ended + 60, NODES, 40, 60, places={2: "n1", 3: "parity"})
    (failure,) = numbers(*job.write(tmp_path / "run.jsonl"))["failures"]
    assert (failure["emptied"], failure["gone"], failure["source"]) == (["n2"], [], "memory")
    assert failure["places"] == {"own node": 2, "memory of n1": 1, "parity": 1}


def test_ranks_that_commits_waited_for_are_listed_those_first_that_cost_most(tmp_path: Path) -> None:
    job = made_logs.Job()
    job.launch("a", made_logs.BEGAN, NODES, None, 60)
    late = {10: (3, "copy", 2.0), 20: (1, "training", 0.5), 30: (3, "copy", 3.0), 40: (3, "copy", 2.5),
            60: (3, "transfer", 0.25)}  # fmt: skip
    for line in job.lines["n1"]:
        if line["event"] == "commit" and line["rank"] == 0 and line["step"] in late:
            line |= dict(zip(("slowest", "late_in", "late_s"), late[line["step"]], strict=True))
    logs = job.write(tmp_path / "run.jsonl")
    keys = ("rank", "node", "phase", "commits", "median_s", "most_s", "step")
    assert numbers(*logs)["waited_for"] == [dict(zip(keys, row, strict=True)) for row in (
        (3, "n2", "copy", 3, 2.5, 3.0, 40), (1, "n1", "training", 1, 0.5, 0.5, 20),
        (3, "n2", "transfer", 1, 0.25, 0.25, 60))]  # fmt: skip
    assert "Ranks that delayed commits" in page(*logs)


def test_each_event_that_ranks_write_is_read() -> None:
    recorder = Path(__file__).parents[3] / "mlflash/telemetry/recorder.py"
    written = set(re.findall(r'events\.add\("([a-z]+)"', recorder.read_text()))
    assert len(written) > 15 and written <= set(typing.get_args(EventKind))


@pytest.mark.parametrize(("restored", "source", "lost", "committed"), [
    (None, "memory", 50, 50), (20, "/lustre/step-20", 30, 30), (50, "memory", 0, 0),
])  # fmt: skip
def test_steps_are_lost_from_the_restored_one_to_the_newest(
    tmp_path: Path, restored: int | None, source: str, lost: int, committed: int
) -> None:
    job = made_logs.Job()
    ended = job.launch("a", made_logs.BEGAN, NODES, None, 50, end=None)
    job.launch("b", ended + 60, NODES, restored, 60, source=source)
    (failure,) = numbers(*job.write(tmp_path / "run.jsonl"))["failures"]
    assert (failure["restored"], failure["steps_lost"], failure["committed_lost"]) == (restored, lost, committed)
    assert failure["source"] == (source if restored else "")


def test_a_launch_that_dies_before_it_restored_loses_no_step_of_its_own(tmp_path: Path) -> None:
    job = made_logs.Job()
    ended = job.launch("a", made_logs.BEGAN, NODES, None, 40, end=None)
    job.launch("b", ended + 60, NODES, None, 0, end=None)
    job.launch("c", ended + 90, NODES, 40, 60)
    stats = numbers(*job.write(tmp_path / "run.jsonl"))
    assert [(row["newest"], row["restored"], row["steps_lost"]) for row in stats["failures"]] == [
        (40, 40, 0), (None, 40, 0)]  # fmt: skip
    assert stats["seconds"]["starting_s"] == pytest.approx(2.5 + 5)  # of b up to its last sign, of c


def test_going_back_within_a_launch_loses_what_came_after(tmp_path: Path) -> None:
    events = starts(0.0) + saved(10, 10.0, NODES, "a", 1) + saved(20, 20.0, NODES, "a", 2)
    events += [say("restore", 32.0, rank, node, step=10, seconds=2.0, nbytes=1, source="memory") for rank, node in
               enumerate(NODES)]  # fmt: skip
    events += saved(20, 42.0, NODES, "a", 3)
    events += [say("end", 45.0, rank, node, state="ended") for rank, node in enumerate(NODES)]
    stats = numbers(write(tmp_path / "run.jsonl", events))
    assert not stats["failures"]
    seconds = stats["seconds"]  # kept: 0 to 10.5, 32 to 45; lost: 10.5 to 30; restoring: 30 to 32
    assert (seconds["kept_s"], seconds["stall_s"], seconds["lost_s"], seconds["starting_s"]) == (22.5, 1.0, 19.5, 2.0)


@pytest.mark.parametrize(
    ("ends", "state", "failed", "silent", "words"),
    [
        ({0: "ended", 1: "ended"}, "ended", 0, [], "ended by itself"),
        ({0: "failed", 1: "failed"}, "failed", 1, [], "ended by an exception"),
        ({0: "failed"}, "killed", 1, [1], "some ranks never logged their end"),
        ({}, "open", 0, [], "running, or all ranks were killed"),
    ],
)
def test_how_the_newest_launch_ended(
    tmp_path: Path, ends: dict[int, str], state: str, failed: int, silent: list[int], words: str
) -> None:
    events = starts(0.0) + saved(10, 10.0, NODES, "a", 1)
    events += [say("end", 14.0, rank, NODES[rank], state=how) for rank, how in ends.items()]
    log = write(tmp_path / "run.jsonl", events)
    stats = numbers(log)
    assert (stats["state"], [failure["first_silent"] for failure in stats["failures"]]) == (state, [silent] * failed)
    assert words in page(log)


def test_ranks_that_missed_a_save_of_the_others_went_first(tmp_path: Path) -> None:
    events = starts(0.0) + saved(10, 10.0, NODES, "a", 1) + saved(20, 20.0, NODES[:1], "a")
    events += [say("warning", 25.0, 0, "n1", level="WARNING", text="waits for rank 1"), *starts(50.0, "b")]
    stats = numbers(write(tmp_path / "run.jsonl", events))
    (failure,) = stats["failures"]
    assert (failure["first_silent"], failure["first_nodes"], failure["went_on"]) == ([1], ["n2"], False)
    assert stats["warnings"] == [{"level": "WARNING", "text": "waits for rank 1", "count": 1, "first": 25.0,
                                 "last": 25.0, "ranks": [0]}]  # fmt: skip


def test_a_courier_that_outlives_its_trainer_is_no_sign_of_the_training(tmp_path: Path) -> None:
    events = starts(0.0) + saved(10, 10.0, NODES, "a", 1) + saved(20, 20.0, NODES, "a")
    for rank, node in enumerate(NODES):
        events.append(say("commit", 32.0, rank, node, step=20, by="courier", seconds=12.0, generation=2))
    (failure,) = numbers(write(tmp_path / "run.jsonl", events + starts(50.0, "b")))["failures"]
    assert (failure["time"], failure["down_s"], failure["first_silent"], failure["committed"]) == (20.5, 29.5, [], 20)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 200), st.integers(0, 8)), min_size=1, max_size=5))
def test_the_parts_of_the_time_add_up_whenever_a_job_is_killed(launches: list[tuple[float, int]]) -> None:
    job = made_logs.Job()
    at, newest = made_logs.BEGAN, 0
    for number, (lasts, back) in enumerate(launches):
        step = max(0, newest - 10 * back) or None
        job.launch(f"run{number}", at, NODES, step, 1000, dies=dict.fromkeys(NODES, at + lasts), end=None)
        logged = [line for lines in job.lines.values() for line in lines]
        newest = max((line["step"] for line in logged if line["event"] == "save"), default=0)
        at += lasts + 30
    with tempfile.TemporaryDirectory() as folder:
        stats = numbers(*job.write(Path(folder) / "run.jsonl"))
    assert stats["seconds"]["wall_s"] == pytest.approx(stats["ended"] - stats["began"])
    assert min(stats["seconds"].values()) >= 0 and 0 <= stats["goodput"] <= 1
    assert len(stats["failures"]) == len(launches) - 1


def test_lines_that_stop_in_the_middle_cost_nothing_of_the_next_launch(tmp_path: Path) -> None:
    start = json.dumps(say("start", 5.0, 0, "n1", nodes=["n1"], **PLAN), separators=(",", ":"))
    end = json.dumps(say("end", 9.0, 0, "n1", state="ended"), separators=(",", ":"))
    path = tmp_path / "run.jsonl"
    path.write_bytes((start + "\n" + start[:40] + start + "\nfoo\n[1]\n{}\n" + end + "\n" + end[:17]).encode())
    stats = numbers(path)
    assert stats["files"] == [{"path": str(path), "lines": 7, "events": 3, "torn": 2, "foreign": 3, "first_foreign": 3,
                              "journal": 0}]  # fmt: skip
    assert stats["notes"][1:] == ["2 lines stopped in the middle, as happens when a process is killed",
                             f"no event in 3 lines (the first: {path}, line 3)"]  # fmt: skip


@pytest.mark.parametrize("change", [
    {"time": float("nan")}, {"time": 1e300}, {"rank": True}, {"run": None}, {"seconds": 10**400}, {"event": ["save"]},
], ids=str)  # fmt: skip
def test_an_event_with_a_field_that_makes_no_sense_is_left_out(tmp_path: Path, change: dict[str, Any]) -> None:
    event = say("save", 5.0, 0, "n1", step=10, seconds=0.5, nbytes=100)
    (file,) = numbers(write(tmp_path / "run.jsonl", [event, {**event, **change}]))["files"]
    assert (file["events"], file["foreign"], file["first_foreign"]) == (1, 1, 2)


BAD = "</script><script>alert(1)</script><img src=x onerror=alert(2)>'\""
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.integers(0, 3), st.floats(0, 100),
    st.sampled_from(["n1", "n2", "a", "b", "memory", BAD, "\x00", "\ud800"]),
    st.lists(st.text(max_size=3), max_size=3),
)  # fmt: skip
FIELDS = ("step", "seconds", "nbytes", "ranks", "nodes", "survives", "job", "source", "from", "why", "path", "error",
          "text", "level", "state", "generation", "redundancy", "slowest", "late_in", "late_s", "peers")  # fmt: skip
EVENTS = st.builds(
    lambda kind, time, rank, run, more, fields: {
        "event": kind, "time": time, "rank": rank, "node": f"n{rank}", "run": run, "step": fields[0],
        "seconds": fields[1], "nbytes": fields[2], **more,
    },
    st.sampled_from(typing.get_args(EventKind)), st.floats(0, 2.5e11), st.integers(0, 3), st.sampled_from(["a", "b"]),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4),
    st.tuples(st.integers(-1, 2**63 - 1), st.floats(0, 1e11), st.integers(0, 2**63 - 1)),
)  # fmt: skip
JOURNAL = st.builds(
    lambda kind, more, time, seconds: {"time": time, "event": kind, "round": 2, "lost": [1, 0], "step": 3,
                                       "seconds": seconds, **more},
    st.sampled_from(["recovered", "recovered", "moved", "hang", "end", "late", "start"]),
    st.dictionaries(st.sampled_from(["round", "lost", "why", "step", "times", "rank", "cause"]), VALUES, max_size=2),
    st.floats(0, 1000), st.floats(0, 100),
)  # fmt: skip
LINES = st.one_of(
    st.binary(max_size=60), EVENTS.map(json.dumps).map(str.encode), JOURNAL.map(json.dumps).map(str.encode),
    st.sampled_from([b'{"event":', b"[" * 5000, b"1" * 5000, b'{"event":"save","time":', b"\xff\xfe", b"\0" * 9]),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(LINES, max_size=20), st.sampled_from([b"\n", b"\n", b"\n", b""]))
@example([json.dumps(say("start", 0.0, rank, node)).encode() for rank, node in enumerate(("", "n0"))], b"\n")
def test_whatever_is_in_the_files_nothing_is_raised_and_nothing_is_markup(lines: list[bytes], between: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        path.write_bytes(between.join([*lines, json.dumps(say("start", 1.0, 0, BAD, job=BAD)).encode()]))
        result = CliRunner().invoke(main, ["report", str(path), "--json"])
        if result.exit_code == 1:
            assert result.stderr.startswith("Error: no event in")
            return
        (file,) = json.loads(result.stdout)["files"]
        assert file["events"] + file["journal"] + file["torn"] + file["foreign"] >= file["lines"]
        page(path)


def test_the_rows_are_ranks_and_of_hundreds_of_them_nodes_on_one_small_page(tmp_path: Path) -> None:
    paths = made_logs.large(tmp_path / "run.jsonl")
    text = page(paths[0])
    assert len(paths) == 65 and len(text.encode()) < 2_000_000
    rows = re.findall(ROW, text)
    assert 32 <= len(rows) <= 64 and {"node032", "spare0", "node000, node001"} <= set(rows)
    made_logs.eventful(tmp_path / "small.jsonl")
    assert re.findall(ROW, page(tmp_path / "small.jsonl")) == [
        f"n{node}, rank {rank}"
        for node, ranks in ((1, (0, 1)), (2, (2, 3)), (3, (4, 5)), (4, (6, 7)), (5, (4, 5))) for rank in ranks
    ]  # fmt: skip


def test_missing_files_clocks_apart_and_several_jobs_are_told(tmp_path: Path) -> None:
    job = made_logs.Job()
    ended = job.launch("a", made_logs.BEGAN, NODES, None, 40)
    job.launch("b", ended + 60, NODES, 40, 60)
    job.lines["n2"] = [line for line in job.lines["n2"] if (line["rank"], line["run"]) != (3, "a")]
    for line in (*job.lines["n1"], *job.lines["n2"]):
        line |= {"job": "other"} if line["run"] == "b" else {}
    for line in job.lines["n2"]:
        line["time"] += 7.5
    assert numbers(*job.write(tmp_path / "run.jsonl"))["notes"] == [
        "launch 1: 1 of 4 ranks have no event: give the files of all nodes",
        "these are the logs of 2 jobs, treated as one job: other, run42-1c0d5a3e",
        "the commits show that the clock of n2 is 7.5 s ahead of that of n1",
    ]


def test_the_command_writes_the_page_and_prints_the_numbers(lost_node: Path, tmp_path: Path) -> None:
    output = tmp_path / "out" / "page.html"
    output.parent.mkdir()
    assert report(lost_node, "-o", output).stdout == f"{output}: 2 launches, 1 failure, goodput 38.8 %\n"
    assert [path.name for path in output.parent.iterdir()] == ["page.html"]
    output.unlink()
    report(lost_node, "--json")
    assert [*output.parent.iterdir()] == []
    assert json.loads(report(lost_node, "--json", "-o", output).stdout) == numbers(lost_node) and output.exists()


def test_the_command_says_what_is_wrong(tmp_path: Path, lost_node: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("no event\n")
    assert "no event in" in report(empty, "-o", tmp_path / "r.html", code=1).stderr
    assert "does not exist" in report(tmp_path / "missing.jsonl", code=2).stderr
    assert "No such file" in report(lost_node, "-o", tmp_path / "no" / "r.html", code=1).stderr
    assert not (tmp_path / "r.html").exists()


# Ranks that were lost and replaced while the other processes stayed, by the journal of mlflash run


CAUSE = {"kind": "killed", "text": "its process was killed by signal 9", "evidence": "from outside", "rank": 1,
         "host": "n2"}  # fmt: skip


def recovered(time: float = 1036.0, **fields: Any) -> dict[str, Any]:
    return {"event": "recovered", "time": time, "round": 2, "lost": [1], "why": CAUSE["text"], "step": 20,
            "ranks": 2, "seconds": 4.0, "times": TIMES, "cause": CAUSE, **fields}  # fmt: skip


@pytest.fixture
def events(tmp_path: Path) -> Path:
    """Steps 10 and 20 are committed, rank 1 of n2 is lost after 31.5 s, and a spare on n3 has it from 36 s on.

    Step 30 is saved a second before that by both, and not committed.
    """
    job = made_logs.Job(ranks_per_node=1)
    job.launch("a", 1000.0, ["n1", "n2"], None, 30, end=None, dies={"n1": 1031.5, "n2": 1031.5})
    job.say("end", 1032.5, "a", 0, "n1", state="failed")
    job.launch("b", 1033.0, ["n1", "n3"], 20, 40, ready_s=2.75)
    return job.write(tmp_path / "events.jsonl")[0]


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return made_logs.journal(
        tmp_path / "run.jsonl",
        {"event": "start", "time": 999.0, "job": "j", "number": 0, "hosts": ["n1", "n2"], "ranks": 2},
        recovered(),
        {"event": "host_back", "time": 1050.0, "host": "n2"},
        {"event": "end", "time": 1070.0, "why": "", "code": 0, "lost": {}, "newest": 40, "restored": 20},
        {"event": "finish", "time": 1071.0, "code": 0, "why": "all ranks came to their end", "scavenged": None},
    )


def test_a_recovery_in_place_is_neither_training_nor_a_relaunch(events: Path, journal: Path) -> None:
    stats = numbers(events, journal)
    # Known at 1032 s, trained again from 1036 s to 1059.25 s; step 20 was saved until 1021 s.
    assert stats["seconds"] == {
        "wall_s": 59.25, "kept_s": 20.0 + 22.25, "stall_s": 1.0 + 1.0, "lost_s": 11.0, "starting_s": 0.0,
        "recovering_s": 4.0, "down_s": 0.0,
    }  # fmt: skip
    assert (stats["failures"], stats["state"], stats["nodes"], stats["ranks"]) == ([], "ended", ["n1", "n3"], 2)
    (launch,) = stats["launches"]
    assert (launch["run"], launch["restored"], launch["newest"], launch["state"]) == ("a", None, 40, "ended")
    assert stats["recoveries"] == [{
        "launch": 0, "began": 1032.0, "ended": 1036.0, "seconds": 4.0, "round": 2, "lost": [1], "kind": "killed",
        "why": "rank 1 on n2: its process was killed by signal 9", "evidence": "from outside", "step": 20, "ranks": 2,
        "times": TIMES, "steps_lost": 10, "committed_lost": 0, "lost_s": 11.0,
    }]  # fmt: skip
    assert (stats["steps_lost"], stats["committed_steps_lost"], stats["notes"], stats["warnings"]) == (10, 0, [], [])
    assert stats["files"][-1]["journal"] == 5 and (stats["moves"], stats["hangs"]) == ([], [])


def test_moves_and_hangs_in_the_journal_are_listed_and_a_move_is_no_failure(events: Path, tmp_path: Path) -> None:
    hang = {"event": "hang", "time": 1031.8, "round": 1, "rank": 1, "host": "n2", "seconds": 300.0, "others": ["a sum"],
            "why": "it hung in train.py:7, after a broadcast"}  # fmt: skip
    moved = recovered(event="moved", lost=[], why="n2 is to be left") | {"step": 30}
    del moved["cause"]
    stats = numbers(events, journal := made_logs.journal(tmp_path / "run.jsonl", hang, moved))
    assert (stats["failures"], stats["recoveries"], len(stats["launches"]), stats["steps_lost"]) == ([], [], 1, 0)
    (move,), (row,) = stats["moves"], stats["hangs"]
    assert (move["began"], move["ended"], move["lost"], move["why"]) == (1032.0, 1036.0, [], "n2 is to be left")
    assert (row["ranks"], row["node"], row["seconds"], row["others"]) == ([1], "n2", 300.0, ["a sum"])
    text = page(events, journal)
    assert 'title="move M1"' in text and "n2 is to be left" in text and "rank 1\nn2" in text and hang["why"] in text


def test_the_page_and_the_command_tell_of_recoveries_in_place(events: Path, journal: Path, tmp_path: Path) -> None:
    output = tmp_path / "r.html"
    result = CliRunner().invoke(main, ["report", str(events), str(journal), "-o", str(output)])
    assert result.stdout == f"{output}: 1 launch, 0 failures, 1 loss recovered in place, goodput 71.3 %\n"
    text = output.read_text()
    assert "0 failures and 1 recovery in place in 59 s cost 25.3 % of the time" in " ".join(text.split())
    assert (
        'title="recovery R1"' in text and "killed\nrank 1 on n2: its process was killed by signal 9\nfrom out" in text
    )
    assert "4 s\nleave: 250 ms" in text and 'title="n3, rank 1"' in text and "down after" not in text
    alone = CliRunner().invoke(main, ["report", str(journal), "-o", str(output)])
    assert alone.exit_code == 1 and "the journal of `mlflash run` alone is not enough" in alone.stderr


def test_without_a_recovery_in_the_journal_each_loss_is_a_failure(events: Path, journal: Path) -> None:
    alone = numbers(events)
    journal.write_text("".join(line for line in journal.read_text().splitlines(True) if "recovered" not in line))
    beside = numbers(events, journal)
    assert (len(alone["launches"]), len(alone["failures"]), alone["recoveries"]) == (2, 1, [])
    files = alone.pop("files"), beside.pop("files")
    assert alone == beside and len(files[1]) == len(files[0]) + 1


def test_rounds_that_failed_before_all_had_begun_are_part_of_the_recovery(tmp_path: Path) -> None:
    job = made_logs.Job(ranks_per_node=1)
    job.launch("a", 1000.0, ["n1", "n2"], None, 30, end=None)
    job.launch("b", 1036.0, ["n1", "n3"], None, 0, end=None)
    job.launch("c", 1040.0, ["n1", "n4"], 20, 40, ready_s=2.0)
    journal = made_logs.journal(tmp_path / "run.jsonl", recovered(1042.0, seconds=8.0, round=3, lost=[1, 1]))
    stats = numbers(job.write(tmp_path / "events.jsonl")[0], journal)
    assert (len(stats["launches"]), stats["failures"], stats["nodes"], stats["notes"]) == (1, [], ["n1", "n4"], [])
    assert [stats["seconds"][part] for part in ("recovering_s", "starting_s", "down_s")] == [8.0, 0.0, 0.0]
    assert [row["lost"] for row in stats["recoveries"]] == [[1]]


def test_a_relaunch_after_a_recovery_is_a_failure_as_ever(events: Path, journal: Path) -> None:
    job = made_logs.Job(ranks_per_node=1)
    job.launch("a", 1000.0, ["n1", "n2"], None, 30, end=None)
    job.launch("b", 1033.0, ["n1", "n3"], 20, 40, ready_s=2.75, end=None)
    job.launch("c", 1100.0, ["n1", "n3"], 40, 60)
    with journal.open("a") as file:  # an end without a reason before it, and one that belongs to a later launch
        for time, why, kind in ((1060.0, "", "exit"), (1063.0, "exit code 1", "error"), (2000.0, "late", "node")):
            cause = {"kind": kind, "text": "ValueError: NaN", "evidence": "train.py:9", "rank": 0, "host": "n1"}
            file.write(json.dumps({"event": "end", "time": time, "why": why, "cause": cause}) + "\n")
    stats = numbers(job.write(events)[0], journal)
    (failure,), (recovery,) = stats["failures"], stats["recoveries"]
    cause = failure["kind"], failure["why"], failure["evidence"]
    assert cause == ("error", "rank 0 on n1: ValueError: NaN", "train.py:9")
    assert (len(stats["launches"]), failure["launch"], failure["restored"], recovery["launch"]) == (2, 0, 40, 0)
    assert (failure["gone"], failure["lost_s"], recovery["lost_s"]) == ([], pytest.approx(2.01), 11.0)
    assert stats["seconds"]["wall_s"] == pytest.approx(stats["ended"] - stats["began"])


def test_a_recovery_of_which_no_rank_tells_is_left_out_and_said(events: Path, tmp_path: Path) -> None:
    stats = numbers(events, made_logs.journal(tmp_path / "run.jsonl", recovered(), recovered(5000.0, round=7)))
    assert len(stats["recoveries"]) == 1
    assert any("1 line of the journal record" in note and "(round 7)" in note for note in stats["notes"])


@pytest.mark.parametrize("change", [
    {"time": None}, {"seconds": -1}, {"round": 1.5}, {"lost": []}, {"times": {"wait": -1.0}}, {"run": "a"},
    {"event": "moved"}, {"cause": "a signal"}, {"event": "hang"},
], ids=str)  # fmt: skip
def test_a_line_with_a_field_that_makes_no_sense_is_left_out(
    events: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    path = made_logs.journal(tmp_path / "run.jsonl", recovered(), {**recovered(), **change})
    file = numbers(events, path)["files"][-1]
    assert (file["lines"], file["foreign"], file["first_foreign"], file["journal"]) == (2, 1, 2, 1)


def test_whatever_the_journal_says_is_known_to_the_report() -> None:
    assert set(recovered()) - {"event"} == set(Recovered.__struct_fields__) - {"kind"}
    assert CAUSE.keys() == Cause("exit", "").fields.keys()
    root = Path(mlflash.__file__).parent
    kinds = {kind for path in (root / "run").glob("*.py") for kind in re.findall(r'note\(\s*"(\w+)"', path.read_text())}
    assert kinds >= {"start", "recovered", "host_back"} and kinds <= {*_JOURNAL_KINDS}
