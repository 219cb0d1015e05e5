"""The upper parts of the page: what it comes to, where the time went, the timeline, the curves, the interval."""

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
    "failed": ("failed", "The newest launch was ended by an exception."),
    "killed": ("failed", "Some ranks of the newest launch never said that they end."),
    "open": ("running", "No rank of the newest launch has said that it ends: it is running, or all were killed."),
}
_CLOSE_UPS = 3  # failures that are drawn from close
_MOST_SHARES = 0.9995  # above that 100.0 % would be said of what is not all


def name_of(story: JobHistory) -> str:
    """The job's name, or what stands for it."""
    return (story.started.text("job") if story.started is not None else "") or "job"


def share(value: float) -> str:
    """Write a share; all of it only where it is all."""
    return f"{100 * value:.2f} %" if _MOST_SHARES <= value < 1 else f"{100 * value:.1f} %"


def head(story: JobHistory) -> Markup:
    """The name of the job, when it ran, and what is to be said about it in one sentence."""
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
    """What it comes to, in a sentence or two."""
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
    text = f"{count} in {lasted(account.wall_s)} cost {share_} of it.{_in_place(story)}"
    if not back:
        return f"{text} Training has not gone on since."
    memory = sum(failure.source == "memory" for failure in back)
    if all(failure.restored is None for failure in back):
        return f"{text} Training began anew."
    where = "memory" if memory == len(back) else f"memory {memory} of {len(back)} times" if memory else "the directory"
    if story.committed_lost:
        return (
            f"{text} Training went on from {where}; {many(story.committed_lost, 'step')} that were committed were lost."
        )
    return f"{text} Training went on from {where}, and no step that was committed was lost."


def _in_place(story: JobHistory) -> str:
    """What recoveries in place come to; "" where there was none."""
    if not story.recoveries:
        return ""
    lost_s = sum(recovery.lost_s for recovery in story.recoveries)
    cost = _small_share(story.account.share(story.account.recovering_s + lost_s))
    return f" {many(len(story.recoveries), 'loss')} of ranks, recovered in place, cost {cost} of it."


def _small_share(value: float) -> str:
    return f"{100 * value:.2g} %" if value < 0.1 else share(value)


def headline(story: JobHistory) -> Markup:
    """The figures that matter most, each with a sentence."""
    return tag("div", *_figures(story), class_="figures", role="list")


def _figures(story: JobHistory) -> Iterator[Markup]:
    account, failures, stall, newest = story.account, story.failures, story.stall, story.newest
    yield _figure("goodput", account.goodput, "Goodput", share(account.goodput),
                  "of the time training made progress that was kept")  # fmt: skip
    yield _figure("failures", len(failures), "Failures", f"{len(failures)}",
                  f"in {many(len(story.launches), 'launch')}; a launch that did not end by itself is one",
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
                  "of each rank's state, while it was protected on other nodes")  # fmt: skip
    most = max((one.peak_nbytes for one in story.memory), default=0)
    yield _figure("memory", most, "Memory", show_bytes(most) if most else "unknown",
                  "of a node's memory are taken by checkpoints, at most")  # fmt: skip
    if newest is None:
        yield _figure("newest", -1, "Newest checkpoint", "none", "no step was committed")
    else:
        age = lasted(max(0.0, story.ended - newest.time))
        drained = "" if story.drains.newest is None else f"; on disk: {story.drains.newest:,}"
        yield _figure("newest", newest.step, "Newest checkpoint", f"step {newest.step:,}",
                      f"committed {age} before the end of the log{drained}")  # fmt: skip


def _lost_steps(story: JobHistory) -> str:
    if story.steps_lost and not story.committed_lost:
        return "begun to be saved before a failure, not committed"
    return "saved before a failure, not restored after it"


def _committed(story: JobHistory) -> str:
    text = "steps that other nodes hold, too"
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
    """A bar of all the time, divided by what it was spent on; and the same as a table."""
    account = story.account
    kept = [
        ("kept", account.kept_s, "Training, kept", "steps whose results were kept"),
        ("stall", account.stall_s, "Held up by saves", "while a save copied the state; on the slowest rank"),
        ("redone", account.lost_s, "Training, lost", "after the step that the next launch restored; done again"),
        ("restore", account.starting_s, "Starting", "from the first sign of a launch until all ranks had restored"),
        *([("recovered", account.recovering_s, "Recovering in place",
            "from a lost rank until all trained again, in the processes that stayed")] if story.recoveries else []),
        ("nothing", account.down_s, "Down", "from the last sign of a launch to the first one of the next"),
    ]  # fmt: skip
    bars, at = [], 0.0
    for kind, seconds, label, _ in kept:
        if seconds > 0:
            text = f"{label}: {lasted(seconds)}, {_small_share(account.share(seconds))}"
            width = percent(max(account.share(seconds), 0.001))
            bars.append(tag("rect", titled(text), x=percent(at), width=width, y=0, height=28, class_=kind))
        at += account.share(seconds)
    title = "The time from the first event to the last, by what it was spent on"
    bar = tag("svg", titled(title), *bars, width="100%", height=28, role="img", aria_label=title, class_="bar")
    items = [
        tag("tr", tag("th", tag("i", class_=f"key {kind}"), label, scope="row"), tag("td", lasted(seconds)),
            tag("td", _small_share(account.share(seconds))), tag("td", text, class_="what"))
        for kind, seconds, label, text in kept
    ]  # fmt: skip
    heads = [tag("th", name, scope="col") for name in ("Spent on", "Time", "Share", "What that is")]
    table = tag("table", tag("thead", tag("tr", *heads), class_="unseen"), tag("tbody", *items), class_="shares")
    return tag("div", bar, table)


_LEGEND = [
    ("alive", "alive", "from the first to the last sign of a rank in a launch"),
    ("stall", "stall", "training was held up by a save"),
    ("protect", "protect", "copies or parity were made on other nodes, while training went on"),
    ("commit", "commit", "all ranks agreed that the step is kept"),
    ("drain", "drain", "the step was written to the directory, while training went on"),
    ("restore", "restore", "the state was read back"),
    ("failure", "failure", "the last sign of a launch that did not end by itself; numbered as in the table"),
    ("lost", "lost", "training after the step that the next launch restored"),
    ("down", "down", "from the last sign of a launch to the first one of the next"),
]
_IN_PLACE = [("recovered", "recovery in place", "ranks were lost and replaced, and the others stayed; as in the table")]


def timeline(story: JobHistory, lanes: Sequence[Row]) -> Markup:
    """All of the time; from close, the last failures and one save."""
    whole = Window(story.began, story.ended)
    folded = any(row.ranks > 1 for row in lanes)
    note = "Times are UTC. Where marks would be too many, neighbours are one: the paler, the less of it they fill."
    if folded:
        note += " There are more ranks than rows: a row shows the slowest of its ranks."
    drawn = [
        legend(_LEGEND + _IN_PLACE * bool(story.recoveries)),
        draw(story, lanes, whole, "all", "What each rank did, from the first event to the last"),
    ]
    for name, window in _windows(story):
        title = f"{name} from close: {lasted(window.span)}"
        drawn.append(_details(title, draw(story, lanes, window, name.lower().replace(" ", ""), title)))
    save = _save_window(story)
    if save is not None:
        step, window = save
        title = f"One save from close: step {step:,}, {show_seconds(window.span)}"
        drawn.append(_details(title, draw(story, lanes, window, "save", title)))
    return tag("div", tag("p", note, class_="note"), *drawn)


def _details(title: str, content: Markup) -> Markup:
    return tag("details", tag("summary", title), content)


def _windows(story: JobHistory) -> Iterator[tuple[str, Window]]:
    """Two saves before a failure or a recovery in place, and two after training went on."""
    around_s = 2.5 * (story.advice.now_s or 30.0)
    failed = [(f"Failure {number}", one.time, one.time + one.down_s + one.recovery_s)
              for number, one in enumerate(story.failures, 1)]  # fmt: skip
    in_place = [(f"Recovery R{number}", one.began, one.ended) for number, one in enumerate(story.recoveries, 1)]
    for name, began, ended in failed[-_CLOSE_UPS:] + in_place[-_CLOSE_UPS:]:
        window = Window(began - around_s, ended + around_s)
        if window.span < 0.6 * (story.ended - story.began):
            yield name, window


def _save_window(story: JobHistory) -> tuple[int, Window] | None:
    """The newest save that took about as long as most of them until it was committed."""
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
    """How long saves held up training, over time."""
    if not story.stalls:
        return tag("p", "Nothing was saved.", class_="note")
    text = (f"How long each save held up training. Line: the median rank; band: all ranks. "
            f"Mean {show_seconds(story.stall.mean)}, 95 % within {show_seconds(story.stall.p95)}, "
            f"longest {show_seconds(story.stall.most)}, on the slowest rank of each save.")  # fmt: skip
    return _curve(story, story.stalls, "stalls", text, 1.0 if story.stall.most >= 1 else 1e-3, show_seconds)


def bandwidths(story: JobHistory) -> Markup:
    """How fast steps were protected, over time."""
    if not story.bandwidths:
        return tag("p", "Nothing was protected on other nodes.", class_="note")
    text = ("Bytes of a rank's state, over the seconds until they were protected. Line: the median rank; band: all "
            f"ranks. All together {show_bytes(story.bandwidth)}/s for each rank.")  # fmt: skip
    most = max(point.most for point in story.bandwidths)
    unit = next((float(1 << shift) for shift in (40, 30, 20, 10) if most >= 1 << shift), 1.0)
    return _curve(story, story.bandwidths, "bandwidths", text, unit, lambda value: f"{show_bytes(value)}/s")


def _curve(story: JobHistory, points: Sequence[Point], name: str, text: str, unit: float, show: Callable[[float], str]
           ) -> Markup:  # fmt: skip
    times = [failure.time for failure in story.failures]
    drawn = curve(points, Window(story.began, story.ended), times, name, text, unit, show)
    return tag("div", tag("p", text, class_="note"), drawn)


def interval(story: JobHistory) -> Markup:
    """What the measured numbers suggest."""
    advice = story.advice
    costs = advice.costs
    if not advice.best_s or advice.best_waste is None:
        return tag("p", "Nothing was saved, so nothing is known of what a save costs.", class_="note")
    if advice.failures:
        rate = (
            f"{many(advice.failures, 'failure')} in {lasted(story.account.wall_s)}: one every {lasted(costs.mtbf_s)}."
        )
        rate += " That is few to go by." if advice.failures < 5 else ""
    else:
        count = len(story.failures) + len(story.recoveries)
        if not count:
            had = "There was no failure to go by, so"
        elif advice.is_given:
            had = "As given,"
        else:
            few = f"{many(count, 'failure')} in {lasted(story.account.wall_s)}"
            had = f"{few} say{'s' * (count == 1)} too little of how often nodes fail, so"
        rate = (f"{had} one node is taken to fail every {show_seconds(advice.node_mtbf_s)}, which makes one failure "
                f"every {show_seconds(costs.mtbf_s)} on {many(len(story.launches[-1].nodes), 'node')}.")  # fmt: skip
    steps = "" if advice.best_steps is None else f", which is every {many(advice.best_steps, 'step')}"
    best = tag("p", "Save every ", tag("b", show_seconds(advice.best_s)), f"{steps}. That costs about "
               f"{_small_share(advice.best_waste)} of the time, with what failures undo.", class_="advice")  # fmt: skip
    now = ""
    if advice.now_s and advice.now_waste is not None:
        now = f" It was every {show_seconds(advice.now_s)}, which costs {_small_share(advice.now_waste)}."
    restart = "" if advice.restart_measured else " (assumed)"
    text = (f"{rate} A save holds up training for {show_seconds(costs.stall_s)} and is committed after "
            f"{show_seconds(costs.commit_s)}; from a failure until training goes on it takes "
            f"{lasted(costs.restart_s)}{restart}.{now} By Daly (2006); Young (1974) has "
            f"{show_seconds(advice.young_s or 0)}. The curve is flat: any interval near the best will do.")  # fmt: skip
    drawn = waste_curve(advice, lambda interval_s: waste(interval_s, costs, 0.0))
    keys = legend([("best", "suggested", "wastes least"), ("now", "as it was", "median of this log")])
    return tag("div", tag("div", best, tag("p", text, class_="note")), tag("div", keys, drawn), class_="beside")
