"""The upper parts of the page: the summary, where the time went, the timeline, the curves, the interval."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ..human_readable.wording import many
from ..planning.interval import waste
from .curves import curve, waste_curve
from .formatting import clock, day, lasted, show_bytes, show_seconds
from .job_history import JobHistory
from .log_statistics import Point
from .markup import Markup, percent, tag, titled
from .timeline import Window, draw, legend
from .timeline_rows import Row

_STATES = {
    "ended": ("ended", "The newest launch ended by itself."),
    "failed": ("failed", "An exception ended the newest launch."),
    "killed": ("failed", "Some ranks of the newest launch never logged their end."),
    "open": ("running", "No rank of the newest launch has logged its end: it is running, or all ranks were killed."),
}
_CLOSE_UPS = 3  # failures with a detailed drawing
_MOST_SHARES = 0.9995  # a larger share, rounded to one digit, would show as 100.0 %


def name_of(story: JobHistory) -> str:
    """Return the job's name, or "job"."""
    return (story.started.text("job") if story.started is not None else "") or "job"


def share(value: float) -> str:
    """Write a share in percent. Only 1 is "100.0 %"."""
    return f"{100 * value:.2f} %" if _MOST_SHARES <= value < 1 else f"{100 * value:.1f} %"


def head(story: JobHistory) -> Markup:
    """Make the name of the job, when it ran, and its summary."""
    newest = story.launches[-1]
    state, why = _STATES[story.state]
    same_day = day(story.began) == day(story.ended)
    until = clock(story.ended) if same_day else f"{day(story.ended)}, {clock(story.ended)}"
    facts = [
        f"{many(newest.ranks, 'rank')} on {many(len(newest.nodes), 'node')}",
        f"{day(story.began)}, {clock(story.began)} to {until} UTC",
        lasted(story.ended - story.began),
    ]
    if story.started is not None and story.started.text("version"):
        facts.append(f"mlflash {story.started.text('version')}")
    title = tag("h1", name_of(story), tag("span", state, class_=f"state {state}", title=why))
    return tag("header", title, tag("p", " · ".join(facts), class_="facts"), tag("p", verdict(story), class_="verdict"))


def verdict(story: JobHistory) -> str:
    """Summarize the job in a sentence or two."""
    account = story.account
    if not story.failures:
        what = "launch failed" if story.recoveries else "failure"
        text = f"No {what} in {lasted(account.wall_s)}.{_in_place(story)}"
        if story.stall.count:
            text += f" Saving cost {_small_share(account.share(account.stall_s))} of the time."
        return text
    back = [failure for failure in story.failures if failure.went_on]
    cost_s = sum(failure.lost_s + failure.down_s + failure.recovery_s for failure in story.failures)
    count, share_ = many(len(story.failures), "failure"), _small_share(account.share(cost_s))
    text = f"{count} in {lasted(account.wall_s)} cost {share_} of the time.{_in_place(story)}"
    if not back:
        return f"{text} Training has not continued since."
    memory = sum(failure.source == "memory" for failure in back)
    if all(failure.restored is None for failure in back):
        return f"{text} Training began from the start."
    where = "memory" if memory == len(back) else f"memory {memory} of {len(back)} times" if memory else "the directory"
    if story.committed_lost:
        return f"{text} Training continued from {where} and lost {many(story.committed_lost, 'committed step')}."
    return f"{text} Training continued from {where}, and no committed step was lost."


def _in_place(story: JobHistory) -> str:
    """Summarize recoveries in place; "" without any."""
    if not story.recoveries:
        return ""
    lost_s = sum(recovery.lost_s for recovery in story.recoveries)
    cost = _small_share(story.account.share(story.account.recovering_s + lost_s))
    return f" {many(len(story.recoveries), 'loss')} of ranks, recovered in place, cost {cost} of the time."


def _small_share(value: float) -> str:
    return f"{100 * value:.2g} %" if value < 0.1 else share(value)


def headline(story: JobHistory) -> Markup:
    """Make the most important figures, each with a sentence."""
    return tag("div", *_figures(story), class_="figures", role="list")


def _figures(story: JobHistory) -> Iterator[Markup]:
    account, failures, stall, newest = story.account, story.failures, story.stall, story.newest
    yield _figure("goodput", account.goodput, "Goodput", share(account.goodput),
                  "of the time, training made progress that was kept")  # fmt: skip
    yield _figure("failures", len(failures), "Failures", f"{len(failures)}",
                  f"in {many(len(story.launches), 'launch')}; each launch that did not end by itself is a failure",
                  "bad" if failures else "")  # fmt: skip
    if story.recoveries:
        yield _figure("recoveries", len(story.recoveries), "Recovered in place", f"{len(story.recoveries)}",
                      f"ranks were replaced while the others stayed, in "
                      f"{lasted(account.recovering_s / len(story.recoveries))} on average")  # fmt: skip
    yield _figure("steps_lost", story.steps_lost, "Steps lost", f"{story.steps_lost:,}",
                  f"{_lost_steps(story)}; {lasted(account.lost_s)} of training were lost",
                  "bad" if story.committed_lost else "")  # fmt: skip
    yield _figure("stall_mean", stall.mean, "Stall of a save", show_seconds(stall.mean) if stall.count else "none",
                  f"on average, on the slowest rank; 95 % of {many(stall.count, 'save')} took "
                  f"{show_seconds(stall.p95)} or less")  # fmt: skip
    yield _figure("commits", story.commit.count, "Commits", f"{story.commit.count:,}", _committed(story))
    yield _figure("bandwidth", story.bandwidth, "Protection",
                  f"{show_bytes(story.bandwidth)}/s" if story.bandwidth else "none",
                  "of each rank's state, during protection on other nodes")  # fmt: skip
    most = max((one.peak_nbytes for one in story.memory), default=0)
    yield _figure("memory", most, "Memory", show_bytes(most) if most else "unknown",
                  "of a node's memory at most, for checkpoints")  # fmt: skip
    if newest is None:
        yield _figure("newest", -1, "Newest checkpoint", "none", "no step was committed")
    else:
        age = lasted(max(0.0, story.ended - newest.time))
        drained = "" if story.drains.newest is None else f"; on disk: {story.drains.newest:,}"
        yield _figure("newest", newest.step, "Newest checkpoint", f"step {newest.step:,}",
                      f"committed {age} before the end of the log{drained}")  # fmt: skip


def _lost_steps(story: JobHistory) -> str:
    if story.steps_lost and not story.committed_lost:
        return "saves began before a failure but did not commit"
    return "saved before a failure, but not restored after it"


def _committed(story: JobHistory) -> str:
    text = "steps that are complete and protected"
    if story.commit.count:
        text += f", {show_seconds(story.commit.mean)} after their save"
    missing = [f"{count} {what}" for count, what in ((story.failed, "failed"), (story.skipped, "given up")) if count]
    return f"{text}; {', '.join(missing)}" if missing else text


def _figure(name: str, value: float, label: str, shown: str, text: str, mood: str = "") -> Markup:
    return tag(
        "div", tag("h3", label), tag("p", shown, class_="value"), tag("p", text, class_="what"),
        class_=f"figure {mood}".strip(), role="listitem", data_name=name, data_value=repr(value),
    )  # fmt: skip


def time_spent(story: JobHistory) -> Markup:
    """Make a bar of all the time, divided by use, and the same as a table."""
    account = story.account
    kept = [
        ("kept", account.kept_s, "Training, kept", "steps whose results were kept"),
        ("stall", account.stall_s, "Stalled by saves", "while a save copied the state, on the slowest rank"),
        ("redone", account.lost_s, "Training, lost", "after the step that the next launch restored; it was done again"),
        ("restore", account.starting_s, "Starting", "from the first event of a launch until all ranks had restored"),
        *([("recovered", account.recovering_s, "Recovering in place",
            "from the loss of a rank until all ranks trained again, in the processes that stayed")]
          if story.recoveries else []),
        ("nothing", account.down_s, "Down", "from the last event of a launch to the first event of the next"),
    ]  # fmt: skip
    bars, at = [], 0.0
    for kind, seconds, label, _ in kept:
        if seconds > 0:
            text = f"{label}: {lasted(seconds)}, {_small_share(account.share(seconds))}"
            width = percent(max(account.share(seconds), 0.001))
            bars.append(tag("rect", titled(text), x=percent(at), width=width, y=0, height=28, class_=kind))
        at += account.share(seconds)
    title = "The time from the first event to the last, by use"
    bar = tag("svg", titled(title), *bars, width="100%", height=28, role="img", aria_label=title, class_="bar")
    items = [
        tag("tr", tag("th", tag("i", class_=f"key {kind}"), label, scope="row"), tag("td", lasted(seconds)),
            tag("td", _small_share(account.share(seconds))), tag("td", text, class_="what"))
        for kind, seconds, label, text in kept
    ]  # fmt: skip
    heads = [tag("th", name, scope="col") for name in ("Spent on", "Time", "Share", "Meaning")]
    table = tag("table", tag("thead", tag("tr", *heads), class_="unseen"), tag("tbody", *items), class_="shares")
    return tag("div", bar, table)


_LEGEND = [
    ("alive", "alive", "from the first to the last event of a rank in a launch"),
    ("stall", "stall", "a save stalled training"),
    ("protect", "protect", "copies or parity were made on other nodes while training continued"),
    ("commit", "commit", "all ranks agreed that the step is complete and protected"),
    ("drain", "drain", "the step was written to the directory while training continued"),
    ("restore", "restore", "the state was read back"),
    ("failure", "failure", "the last event of a launch that did not end by itself; the table has the same numbers"),
    ("lost", "lost", "training after the step that the next launch restored"),
    ("down", "down", "from the last event of a launch to the first event of the next"),
]
_IN_PLACE = [
    ("recovered", "recovery in place", "ranks were lost and replaced while the others stayed; the table has the same "
     "numbers")
]  # fmt: skip


def timeline(story: JobHistory, lanes: Sequence[Row]) -> Markup:
    """Draw all of the time, and in detail the last failures and one save."""
    whole = Window(story.began, story.ended)
    folded = any(row.ranks > 1 for row in lanes)
    note = "Times are UTC. If there are too many marks, neighbors are drawn as one. A paler mark is filled less."
    if folded:
        note += " There are more ranks than rows, so a row shows the slowest of its ranks."
    drawn = [
        legend(_LEGEND + _IN_PLACE * bool(story.recoveries)),
        draw(story, lanes, whole, "all", "What each rank did, from the first event to the last"),
    ]
    for name, window in _windows(story):
        title = f"{name} in detail: {lasted(window.span)}"
        drawn.append(_details(title, draw(story, lanes, window, name.lower().replace(" ", ""), title)))
    save = _save_window(story)
    if save is not None:
        step, window = save
        title = f"One save in detail: step {step:,}, {show_seconds(window.span)}"
        drawn.append(_details(title, draw(story, lanes, window, "save", title)))
    return tag("div", tag("p", note, class_="note"), *drawn)


def _details(title: str, content: Markup) -> Markup:
    return tag("details", tag("summary", title), content)


def _windows(story: JobHistory) -> Iterator[tuple[str, Window]]:
    """Yield windows from two saves before a failure or a recovery in place to two saves after training continued."""
    around_s = 2.5 * (story.advice.now_s or 30.0)
    failed = [(f"Failure {number}", one.time, one.time + one.down_s + one.recovery_s)
              for number, one in enumerate(story.failures, 1)]  # fmt: skip
    in_place = [(f"Recovery R{number}", one.began, one.ended) for number, one in enumerate(story.recoveries, 1)]
    for name, began, ended in failed[-_CLOSE_UPS:] + in_place[-_CLOSE_UPS:]:
        window = Window(began - around_s, ended + around_s)
        if window.span < 0.6 * (story.ended - story.began):
            yield name, window


def _save_window(story: JobHistory) -> tuple[int, Window] | None:
    """Return the newest save whose time to commit is typical."""
    found = [
        (abs(commit.seconds - story.commit.median) > 0.1 * story.commit.median, -commit.time, stretch, commit)
        for launch in story.launches for stretch in launch.stretches for commit in stretch.commits.values()
        if commit.step in stretch.saves
    ]  # fmt: skip
    if not found:
        return None
    *_, stretch, commit = min(found, key=lambda one: one[:2])
    began = stretch.saves[commit.step].began
    margin_s = max(0.15 * (commit.time - began), 1e-3)
    return commit.step, Window(began - margin_s, commit.time + margin_s)


def stalls(story: JobHistory) -> Markup:
    """Draw how long saves stalled training, over time."""
    if not story.stalls:
        return tag("p", "Nothing was saved.", class_="note")
    text = (f"How long each save stalled training. The line is the median rank, the band is all ranks. On the slowest "
            f"rank of each save, the mean is {show_seconds(story.stall.mean)}, 95 % are within "
            f"{show_seconds(story.stall.p95)}, and the longest is {show_seconds(story.stall.most)}.")  # fmt: skip
    return _curve(story, story.stalls, "stalls", text, 1.0 if story.stall.most >= 1 else 1e-3, show_seconds)


def bandwidths(story: JobHistory) -> Markup:
    """Draw how fast steps were protected, over time."""
    if not story.bandwidths:
        return tag("p", "Nothing was protected on other nodes.", class_="note")
    text = ("Bytes of a rank's state, divided by the seconds until they were protected. The line is the median rank, "
            f"the band is all ranks. The mean is {show_bytes(story.bandwidth)}/s for each rank.")  # fmt: skip
    most = max(point.most for point in story.bandwidths)
    unit = next((float(1 << shift) for shift in (40, 30, 20, 10) if most >= 1 << shift), 1.0)
    return _curve(story, story.bandwidths, "bandwidths", text, unit, lambda value: f"{show_bytes(value)}/s")


def _curve(story: JobHistory, points: Sequence[Point], name: str, text: str, unit: float, show: Callable[[float], str]
           ) -> Markup:  # fmt: skip
    times = [failure.time for failure in story.failures]
    drawn = curve(points, Window(story.began, story.ended), times, name, text, unit, show)
    return tag("div", tag("p", text, class_="note"), drawn)


def interval(story: JobHistory) -> Markup:
    """Suggest an interval from the measured numbers."""
    advice = story.advice
    costs = advice.costs
    if not advice.best_s or advice.best_waste is None:
        return tag("p", "Nothing was saved, so the cost of a save is unknown.", class_="note")
    if advice.failures:
        rate = (
            f"{many(advice.failures, 'failure')} in {lasted(story.account.wall_s)}: one every {lasted(costs.mtbf_s)}."
        )
        rate += " These are few failures for an estimate." if advice.failures < 5 else ""
    else:
        count = len(story.failures) + len(story.recoveries)
        if not count:
            had = "There was no failure, so this assumes that"
        elif advice.is_given:
            had = "As given with --mtbf,"
        else:
            few = f"{many(count, 'failure')} in {lasted(story.account.wall_s)}"
            had = f"{few} {'is' if count == 1 else 'are'} too few for an estimate, so this assumes that"
        rate = (f"{had} one node fails every {show_seconds(advice.node_mtbf_s)}, which makes one failure "
                f"every {show_seconds(costs.mtbf_s)} on {many(len(story.launches[-1].nodes), 'node')}.")  # fmt: skip
    steps = "" if advice.best_steps is None else f", which is every {many(advice.best_steps, 'step')}"
    best = tag("p", "Save every ", tag("b", show_seconds(advice.best_s)), f"{steps}. That costs about "
               f"{_small_share(advice.best_waste)} of the time, including the work that failures undo.",
               class_="advice")  # fmt: skip
    now = ""
    if advice.now_s and advice.now_waste is not None:
        now = f" This job saved every {show_seconds(advice.now_s)}, which costs {_small_share(advice.now_waste)}."
    restart = "" if advice.restart_measured else " (assumed)"
    text = (f"{rate} A save stalls training for {show_seconds(costs.stall_s)} and is committed after "
            f"{show_seconds(costs.commit_s)}. From a failure until training continues it takes "
            f"{lasted(costs.restart_s)}{restart}.{now} The formula is from Daly (2006); Young (1974) gives "
            f"{show_seconds(advice.young_s or 0)}. The curve is flat: any interval near the best is good.")  # fmt: skip
    drawn = waste_curve(advice, lambda interval_s: waste(interval_s, costs, 0.0))
    keys = legend([("best", "suggested", "wastes least"), ("now", "this job", "median of this log")])
    return tag("div", tag("div", best, tag("p", text, class_="note")), tag("div", keys, drawn), class_="beside")
