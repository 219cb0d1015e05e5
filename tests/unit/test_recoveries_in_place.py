"""mlflash report: ranks that were lost and replaced while the other processes stayed, by the journal of mlflash run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import made_logs
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import mlflash
from mlflash.cli import main
from mlflash.log_report.job_history import JobHistory, tell, to_json
from mlflash.log_report.journal import _KINDS, Recovered
from mlflash.log_report.page import page
from mlflash.log_report.read_logs import File, files_of, read
from mlflash.log_report.timeline_rows import rows

TIMES = {"leave": 0.25, "wait": 0.5, "couriers": 0.75, "checkpointer": 0.125, "groups": 0.25, "restore": 1.5}


def story_of(*paths: Path) -> JobHistory:
    return tell(read(files_of([str(path) for path in paths])))


def recovered(time: float = 1036.0, **fields: Any) -> dict[str, Any]:
    return {"event": "recovered", "time": time, "round": 2, "lost": [1], "why": "its process was killed by signal 9",
            "step": 20, "seconds": 4.0, "times": TIMES, **fields}  # fmt: skip


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


def test_the_time_of_a_recovery_in_place_is_neither_training_nor_a_relaunch(events: Path, journal: Path) -> None:
    told = to_json(story_of(events, journal))
    # Known at 1032 s, trained again from 1036 s to 1059.25 s; step 20 was saved until 1021 s.
    assert told["seconds"] == {
        "wall_s": 59.25, "kept_s": 20.0 + 22.25, "stall_s": 1.0 + 1.0, "lost_s": 11.0, "starting_s": 0.0,
        "recovering_s": 4.0, "down_s": 0.0,
    }  # fmt: skip
    assert (told["failures"], told["state"], told["nodes"], told["ranks"]) == ([], "ended", ["n1", "n3"], 2)
    (launch,) = told["launches"]
    assert (launch["run"], launch["restored"], launch["newest"], launch["state"]) == ("a", None, 40, "ended")


def test_a_recovery_says_who_was_lost_and_what_it_cost(events: Path, journal: Path) -> None:
    told = to_json(story_of(events, journal))
    assert told["recoveries"] == [{
        "launch": 0, "began": 1032.0, "ended": 1036.0, "seconds": 4.0, "round": 2, "lost": [1],
        "why": "its process was killed by signal 9", "step": 20, "times": TIMES, "steps_lost": 10, "committed_lost": 0,
        "lost_s": 11.0,
    }]  # fmt: skip
    assert (told["steps_lost"], told["committed_steps_lost"], told["notes"], told["warnings"]) == (10, 0, [], [])
    assert told["interval"]["restart_s"] == 4.0, "which is measured, though one failure is no rate"


def test_the_page_shows_a_recovery_on_the_timeline_and_in_the_account(events: Path, journal: Path) -> None:
    story = story_of(events, journal)
    text = page(story)
    mark = ("R1: rank 1 was lost (its process was killed by signal 9). The other processes stayed, and all ranks "
            "continued after step 20, 4 s later: 250 ms to leave the step, 500 ms to wait for the others, 750 ms to "
            "start couriers, 125 ms to make a Checkpointer, 250 ms to make process groups, 1.5 s to "
            "restore")  # fmt: skip
    assert f'<g class="recovered"><title>{mark}</title>' in text
    assert "Recovering in place: 4 s, 6.8 %" in text
    assert "No launch failed in 59 s. 1 loss of ranks, recovered in place, cost 25.3 % of the time." in text
    assert 'id="recoveries"' in text and "1 failure in 59 s" in text and "down for" not in text
    assert [(row.node, row.name, len(row.lives)) for row in rows(story.launches)] == [
        ("n1", "rank 0", 1), ("n2", "rank 1", 1), ("n3", "rank 1", 1)]  # fmt: skip


def test_without_the_journal_and_without_a_recovery_in_it_all_is_as_before(events: Path, journal: Path) -> None:
    alone = to_json(story_of(events))
    journal.write_text("".join(line for line in journal.read_text().splitlines(True) if "recovered" not in line))
    beside = to_json(story_of(events, journal))
    assert (len(alone["launches"]), len(alone["failures"]), alone["seconds"]["recovering_s"]) == (2, 1, 0.0)
    files = alone.pop("files"), beside.pop("files")
    assert alone == beside and len(files[1]) == len(files[0]) + 1
    text = page(story_of(events, journal))
    assert "Recover" not in text and "R1" not in text


def test_a_spare_that_has_waited_for_hours_is_no_part_of_a_recovery(events: Path, tmp_path: Path) -> None:
    journal = made_logs.journal(tmp_path / "run.jsonl", recovered(times={"wait": 7200.0, "restore": 1.5}))
    (one,) = story_of(events, journal).recoveries
    assert (one.line.times, one.line.parts) == ({"wait": 7200.0, "restore": 1.5}, {"restore": 1.5})
    assert "later: 1.5 s to restore" in page(story_of(events, journal))


def test_rounds_that_failed_before_all_had_begun_are_part_of_the_recovery(tmp_path: Path) -> None:
    job = made_logs.Job(ranks_per_node=1)
    job.launch("a", 1000.0, ["n1", "n2"], None, 30, end=None)
    job.launch("b", 1036.0, ["n1", "n3"], None, 0, end=None)
    job.launch("c", 1040.0, ["n1", "n4"], 20, 40, ready_s=2.0)
    journal = made_logs.journal(tmp_path / "run.jsonl", recovered(1042.0, seconds=8.0, round=3, lost=[1, 1]))
    story = story_of(job.write(tmp_path / "events.jsonl")[0], journal)
    assert (len(story.launches), len(story.launches[0].stretches), story.failures) == (1, 2, [])
    assert (story.account.recovering_s, story.account.starting_s, story.account.down_s) == (8.0, 0.0, 0.0)
    assert story.recoveries[0].line.lost == (1,) and story.launches[0].nodes == ("n1", "n4")
    assert [row.node for row in rows(story.launches)] == ["n1", "n2", "n3", "n4"] and page(story)


def test_a_relaunch_after_a_recovery_is_a_failure_as_ever(events: Path, journal: Path) -> None:
    job = made_logs.Job(ranks_per_node=1)
    job.launch("a", 1000.0, ["n1", "n2"], None, 30, end=None)
    job.launch("b", 1033.0, ["n1", "n3"], 20, 40, ready_s=2.75, end=None)
    job.launch("c", 1100.0, ["n1", "n3"], 40, 60)
    story = story_of(job.write(events)[0], journal)
    (failure,), (recovery,) = story.failures, story.recoveries
    assert (len(story.launches), failure.launch, failure.restored, recovery.launch) == (2, 0, 40, 0)
    assert (failure.gone, failure.lost_s, recovery.lost_s) == ((), pytest.approx(2.01), 11.0)
    assert story.account.wall_s == pytest.approx(story.ended - story.began)
    assert "1 failure in 2 min 8 s cost" in page(story) and "1 loss of ranks, recovered in place" in page(story)


def test_a_recovery_of_which_no_rank_tells_is_left_out_and_said(events: Path, tmp_path: Path) -> None:
    journal = made_logs.journal(tmp_path / "run.jsonl", recovered(), recovered(5000.0, round=7))
    story = story_of(events, journal)
    assert len(story.recoveries) == 1
    assert any("1 line of the journal record" in note and "(round 7)" in note for note in story.notes)


def test_ranks_that_were_late_and_killed_are_warnings(events: Path, tmp_path: Path) -> None:
    lines = [{"event": "late", "time": 1034.0, "round": 1, "rank": 3, "phase": "leaving"},
             {"event": "late", "time": 1035.0, "round": 2, "rank": 4, "phase": "seating"}]  # fmt: skip
    story = story_of(events, made_logs.journal(tmp_path / "run.jsonl", *lines, recovered()))
    assert [(one.text, one.ranks) for one in story.remarks] == [
        ("rank 4 was killed: after another rank was lost, it did not train in time in round 2", {4}),
        ("rank 3 was killed: after another rank was lost, it did not leave its step in time in round 1", {3}),
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"time": "now"}, {"time": None}, {"time": float("nan")}, {"seconds": -1}, {"seconds": None}, {"seconds": 1e5},
        {"round": None}, {"round": 1.5}, {"step": None}, {"step": "20"}, {"step": -1}, {"lost": None}, {"lost": []},
        {"lost": ["1"]}, {"lost": [-1]}, {"lost": 1}, {"times": None}, {"times": [1]}, {"times": {"wait": "1"}},
        {"times": {"wait": -1.0}}, {"times": {str(n): 1.0 for n in range(99)}}, {"event": "late", "rank": None},
        {"run": "a"},
    ],
    ids=str,
)  # fmt: skip
def test_a_line_with_a_field_that_makes_no_sense_is_left_out(tmp_path: Path, change: dict[str, Any]) -> None:
    path = made_logs.journal(tmp_path / "run.jsonl", recovered(), {**recovered(), **change})
    log = read([path])
    assert len(log.recovered) == 1 and log.late == []
    assert log.files == [File(str(path), lines=2, foreign=1, first_foreign=2, journal=1)]
    assert log.unknown == ({"recovered": 1} if "run" in change else {})


def test_lines_of_a_journal_that_stop_in_the_middle_cost_no_other_line(journal: Path) -> None:
    line = json.dumps({"time": 1036.0, **recovered()})
    journal.write_text(f"{line[:40]}{line}\n{line[:30]}")
    log = read([journal])
    assert [one.time for one in log.recovered] == [1036.0]
    assert log.files == [File(str(journal), lines=2, torn=2, journal=1)]


def test_whatever_a_journal_says_the_parts_of_the_time_add_up(events: Path, tmp_path: Path) -> None:
    lines = st.builds(
        lambda time, seconds, step: recovered(time, seconds=seconds, step=step),
        st.floats(990.0, 1070.0), st.floats(0.0, 60.0), st.integers(0, 50),
    )  # fmt: skip

    @settings(max_examples=100, deadline=None)
    @given(st.lists(lines, max_size=4))
    def check(lines: list[dict[str, Any]]) -> None:
        story = story_of(events, made_logs.journal(tmp_path / "run.jsonl", *lines))
        account = story.account
        assert account.wall_s == pytest.approx(story.ended - story.began, abs=3.0)
        parts = (account.kept_s, account.stall_s, account.lost_s, account.starting_s, account.recovering_s,
                 account.down_s)  # fmt: skip
        assert min(parts) >= 0 and len(story.recoveries) + len(story.failures) == 1
        json.dumps(to_json(story))
        assert "<script>alert" not in page(story)

    check()


def test_what_a_journal_says_is_no_markup(events: Path, tmp_path: Path) -> None:
    bad = "<script>alert('x')</script>"
    journal = made_logs.journal(tmp_path / "run.jsonl", recovered(why=bad, times={bad: 1.0}))
    text = page(story_of(events, journal))
    assert bad not in text and text.count("&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;") >= 2


def test_the_command_takes_the_journal_among_the_logs(events: Path, journal: Path, tmp_path: Path) -> None:
    said = CliRunner().invoke(main, ["report", str(events), str(journal), "-o", str(tmp_path / "r.html")])
    assert said.stdout == f"{tmp_path}/r.html: 1 launch, 0 failures, 1 loss recovered in place, goodput 71.3 %\n"
    alone = CliRunner().invoke(main, ["report", str(journal), "-o", str(tmp_path / "none.html")])
    assert alone.exit_code == 1 and "no event in" in alone.stderr
    assert "give the event logs of the ranks along with the journal of `mlflash run`" in alone.stderr


def test_a_line_is_what_the_decider_writes() -> None:
    assert set(recovered()) - {"event"} == set(Recovered.__dataclass_fields__)


def test_whatever_a_journal_says_is_known_to_the_report_and_to_the_page() -> None:
    root = Path(mlflash.__file__).parent
    said = {
        kind for path in (root / "launcher").glob("*.py") for kind in re.findall(r'note\(\s*"(\w+)"', path.read_text())
    }
    assert said >= {"start", "recovered", "host_back"}
    assert said <= _KINDS
    page = (Path(__file__).parents[2] / "docs/slurm.md").read_text()
    assert [kind for kind in sorted(said) if f"\n| `{kind}` |" not in page] == []
