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
from mlflash.log_report.event_log import _JOURNAL_KINDS, Recovered

TIMES = {"leave": 0.25, "wait": 0.5, "couriers": 0.75, "checkpointer": 0.125, "groups": 0.25, "restore": 1.5}


def numbers(*logs: Path) -> Any:
    result = CliRunner().invoke(main, ["report", *map(str, logs), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


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


def test_a_recovery_in_place_is_neither_training_nor_a_relaunch(events: Path, journal: Path) -> None:
    told = numbers(events, journal)
    # Known at 1032 s, trained again from 1036 s to 1059.25 s; step 20 was saved until 1021 s.
    assert told["seconds"] == {
        "wall_s": 59.25, "kept_s": 20.0 + 22.25, "stall_s": 1.0 + 1.0, "lost_s": 11.0, "starting_s": 0.0,
        "recovering_s": 4.0, "down_s": 0.0,
    }  # fmt: skip
    assert (told["failures"], told["state"], told["nodes"], told["ranks"]) == ([], "ended", ["n1", "n3"], 2)
    (launch,) = told["launches"]
    assert (launch["run"], launch["restored"], launch["newest"], launch["state"]) == ("a", None, 40, "ended")
    assert told["recoveries"] == [{
        "launch": 0, "began": 1032.0, "ended": 1036.0, "seconds": 4.0, "round": 2, "lost": [1],
        "why": "its process was killed by signal 9", "step": 20, "times": TIMES, "steps_lost": 10, "committed_lost": 0,
        "lost_s": 11.0,
    }]  # fmt: skip
    assert (told["steps_lost"], told["committed_steps_lost"], told["notes"], told["warnings"]) == (10, 0, [], [])
    assert told["files"][-1]["journal"] == 5


def test_the_page_and_the_command_tell_of_recoveries_in_place(events: Path, journal: Path, tmp_path: Path) -> None:
    output = tmp_path / "r.html"
    said = CliRunner().invoke(main, ["report", str(events), str(journal), "-o", str(output)])
    assert said.stdout == f"{output}: 1 launch, 0 failures, 1 loss recovered in place, goodput 71.3 %\n"
    text = output.read_text()
    assert "0 failures and 1 recovery in place in 59 s cost 25.3 % of the time" in " ".join(text.split())
    assert 'title="recovery R1"' in text and "rank 1\nits process was killed by signal 9" in text
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
    told = numbers(job.write(tmp_path / "events.jsonl")[0], journal)
    assert (len(told["launches"]), told["failures"], told["nodes"], told["notes"]) == (1, [], ["n1", "n4"], [])
    assert [told["seconds"][part] for part in ("recovering_s", "starting_s", "down_s")] == [8.0, 0.0, 0.0]
    assert [row["lost"] for row in told["recoveries"]] == [[1]]


def test_a_relaunch_after_a_recovery_is_a_failure_as_ever(events: Path, journal: Path) -> None:
    job = made_logs.Job(ranks_per_node=1)
    job.launch("a", 1000.0, ["n1", "n2"], None, 30, end=None)
    job.launch("b", 1033.0, ["n1", "n3"], 20, 40, ready_s=2.75, end=None)
    job.launch("c", 1100.0, ["n1", "n3"], 40, 60)
    told = numbers(job.write(events)[0], journal)
    (failure,), (recovery,) = told["failures"], told["recoveries"]
    assert (len(told["launches"]), failure["launch"], failure["restored"], recovery["launch"]) == (2, 0, 40, 0)
    assert (failure["gone"], failure["lost_s"], recovery["lost_s"]) == ([], pytest.approx(2.01), 11.0)
    assert told["seconds"]["wall_s"] == pytest.approx(told["ended"] - told["began"])


def test_a_recovery_of_which_no_rank_tells_is_left_out_and_said(events: Path, tmp_path: Path) -> None:
    told = numbers(events, made_logs.journal(tmp_path / "run.jsonl", recovered(), recovered(5000.0, round=7)))
    assert len(told["recoveries"]) == 1
    assert any("1 line of the journal record" in note and "(round 7)" in note for note in told["notes"])


@pytest.mark.parametrize("change", [
    {"time": None}, {"seconds": -1}, {"round": 1.5}, {"lost": []}, {"times": {"wait": -1.0}}, {"run": "a"},
], ids=str)  # fmt: skip
def test_a_line_with_a_field_that_makes_no_sense_is_left_out(
    events: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    path = made_logs.journal(tmp_path / "run.jsonl", recovered(), {**recovered(), **change})
    file = numbers(events, path)["files"][-1]
    assert (file["lines"], file["foreign"], file["first_foreign"], file["journal"]) == (2, 1, 2, 1)


def test_whatever_a_journal_says_the_parts_of_the_time_add_up(events: Path, tmp_path: Path) -> None:
    lines = st.builds(
        lambda time, seconds, step: recovered(time, seconds=seconds, step=step),
        st.floats(990.0, 1070.0), st.floats(0.0, 60.0), st.integers(0, 50),
    )  # fmt: skip

    @settings(max_examples=60, deadline=None)
    @given(st.lists(lines, max_size=4))
    def check(lines: list[dict[str, Any]]) -> None:
        told = numbers(events, made_logs.journal(tmp_path / "run.jsonl", *lines))
        assert told["seconds"]["wall_s"] == pytest.approx(told["ended"] - told["began"], abs=3.0)
        assert min(told["seconds"].values()) >= 0 and len(told["recoveries"]) + len(told["failures"]) == 1

    check()


def test_a_line_is_what_the_decider_writes() -> None:
    assert set(recovered()) - {"event"} == set(Recovered.__struct_fields__)


def test_whatever_a_journal_says_is_known_to_the_report() -> None:
    root = Path(mlflash.__file__).parent
    said = {
        kind for path in (root / "launcher").glob("*.py") for kind in re.findall(r'note\(\s*"(\w+)"', path.read_text())
    }
    assert said >= {"start", "recovered", "host_back"}
    assert said <= {*_JOURNAL_KINDS}
