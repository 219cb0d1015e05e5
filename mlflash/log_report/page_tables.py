"""The tables of the page: failures, memory, the layout, launches, warnings, and what was read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..human_readable.wording import listed, many, named
from .failures import Failure
from .formatting import clock, lasted, show_bytes, show_seconds, show_time
from .job_history import JobHistory
from .markup import Markup, percent, tag, titled
from .recoveries import took

_MOST_WARNINGS = 60
_MOST_NODES = 12
_MOST_LAUNCHES = 100
_MOST_WAITS = 10


def table(heads: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]]) -> Markup:
    """Make a table that becomes a list of cards where the screen is narrow.

    Args:
        heads: names of the columns, and what each means.
        rows: texts and markup.
    """
    head = [tag("th", name, scope="col", title=text or None, role="columnheader") for name, text in heads]
    body = [
        tag("tr", *(tag("td", cell, role="cell", data_label=name) for cell, (name, _) in zip(row, heads, strict=True)),
            role="row")
        for row in rows
    ]  # fmt: skip
    return tag("table", tag("thead", tag("tr", *head, role="row"), role="rowgroup"),
               tag("tbody", *body, role="rowgroup"), role="table", class_="cards")  # fmt: skip


def failures(story: JobHistory) -> Markup:
    """When what went silent, and what training went on from."""
    if not story.failures:
        return tag("p", "None: every launch but the newest one ended by itself.", class_="note")
    heads = [
        ("Failure", "its number in the timeline"),
        ("Last sign (UTC)", "of the launch; what happened came after it"),
        ("What went silent", "ranks that were missing while others still were heard of, or all; and nodes that the "
                             "next launch did not have any more"),
        ("Went on from", "the step that was restored, and where ranks found it"),
        ("Steps lost", "from the newest step that was saved before, if only by some ranks, to the one restored"),
        ("Training lost", "time from the save of the restored step to the last sign"),
        ("Until training", "from the last sign to the first one of the next launch, and until all had restored"),
    ]  # fmt: skip
    rows = [
        (tag("b", str(number)), show_time(failure.time), _silent(story, failure), _back(failure),
         _steps_lost(failure), lasted(failure.lost_s),
         f"{lasted(failure.down_s)} + {lasted(failure.recovery_s)}" if failure.went_on else "-")
        for number, failure in enumerate(story.failures, 1)
    ]  # fmt: skip
    return tag("div", table(heads, rows))


def recoveries(story: JobHistory) -> Markup:
    """Which ranks were lost and replaced, and how long that took."""
    heads = [
        ("Recovery", "its number in the timeline"), ("Known (UTC)", "when the loss was known"),
        ("Lost", "ranks, and what became of their processes"),
        ("Went on from", "the newest committed step, which all went back to"),
        ("Steps lost", "from the newest step that was saved before, if only by some ranks, to the one restored"),
        ("Training lost", "time from the save of the restored step to the loss"),
        ("Until training", "from the known loss until all trained again, and what the slowest rank spent it on"),
    ]  # fmt: skip
    rows = [
        (tag("b", f"R{number}"), show_time(one.began), _and(named(one.line.lost), one.line.why),
         f"step {one.line.step:,}", f"{one.steps_lost:,}", lasted(one.lost_s),
         _and(show_seconds(one.line.seconds), took(one.line.parts)))
        for number, one in list(enumerate(story.recoveries, 1))[-_MOST_LAUNCHES:]
    ]  # fmt: skip
    left_out = len(story.recoveries) - len(rows)
    note = [tag("p", f"The newest {_MOST_LAUNCHES} of {len(story.recoveries)}.", class_="note")] if left_out else []
    return tag("div", *note, table(heads, rows))


def _and(what: str, more: str) -> Markup:
    """Two lines, the second one of which may be missing."""
    return tag("div", what, *((tag("br"), tag("span", more, class_="what")) if more else ()))


def _steps_lost(failure: Failure) -> str:
    if not failure.went_on:
        return "-"
    what = f", of these {failure.committed_lost:,} committed" if failure.committed_lost else ", not committed"
    return f"{failure.steps_lost:,}{what if failure.steps_lost else ''}"


def _silent(story: JobHistory, failure: Failure) -> Markup:
    launch = story.launches[failure.launch]
    if failure.state == "failed":
        text = "no rank: an exception ended them"
    elif failure.first_silent:
        text = named(failure.first_silent) if len(failure.first_silent) < launch.ranks else "all ranks"
        if failure.first_nodes:
            text += f" ({listed(failure.first_nodes)})"
    else:
        text = "not known: all ranks fell silent together"
    lines: list[str] = [text]
    if failure.gone:
        swap = f" → {listed(failure.new)}" if failure.new else ", nothing in its place"
        lines.append(tag("span", f"{listed(failure.gone)}{swap}", class_="swap",
                         title="nodes of this launch → those that the next one had instead"))  # fmt: skip
    if failure.emptied:
        lines.append(tag("span", f"memory of {listed(failure.emptied)}", class_="swap",
                         title="none of the ranks of such a node found its state there any more"))  # fmt: skip
    return tag("div", *(part for number, line in enumerate(lines) for part in ([tag("br")] if number else []) + [line]))


def _back(failure: Failure) -> Markup:
    if not failure.went_on:
        return tag("div", "not yet")
    if failure.restored is None:
        return tag("div", "the beginning")
    where = ", ".join(f"{place}: {many(count, 'rank')}" for place, count in list(failure.places.items())[:4])
    return tag("div", tag("b", f"step {failure.restored:,}"), tag("br"), tag("span", where, class_="what"))


_PHASES = {
    "training": "came to save late",
    "copy": "copied its state into its slot",
    "deferred": "made the copies that save had left for later",
    "checksums": "made checksums and parity, and checked what arrived",
    "transfer": "sent and received what protects it",
}


def waits(story: JobHistory) -> Markup:
    """Which ranks commits waited for, and in which phase."""
    heads = [
        ("Rank", "and its node"), ("Late in", "the phase of the save in which it took longer than most ranks"),
        ("Commits", "in which it was the slowest rank, by more than noise"),
        ("Later by", "than most ranks, the median of these commits"), ("At most", ""), ("Last", "its step"),
    ]  # fmt: skip
    rows = [
        (_and(f"rank {one.rank}", one.node), _and(one.phase, _PHASES.get(one.phase, "")),
         f"{one.commits:,} of {story.commit.count:,}", show_seconds(one.median_s), show_seconds(one.most_s),
         f"step {one.step:,}")
        for one in story.waited_for[:_MOST_WAITS]
    ]  # fmt: skip
    note = "A commit waits for the slowest of all ranks. Those on top made it wait longest in all."
    if (left_out := len(story.waited_for) - _MOST_WAITS) > 0:
        note += f" And {left_out} more, which --json has."
    return tag("div", tag("p", note, class_="note"), table(heads, rows))


def memory(story: JobHistory) -> Markup:
    """A bar for each node."""
    if not story.memory:
        return tag("p", "The log does not tell.", class_="note")
    most = max(one.peak_nbytes for one in story.memory) or 1
    shown = sorted(story.memory, key=lambda one: -one.peak_nbytes)[:_MOST_NODES]
    kept = [one for one in story.memory if one in shown]
    rows = []
    for one in kept:
        text = f"{one.node}: {show_bytes(one.peak_nbytes)} at most, {show_bytes(one.last_nbytes)} at last"
        parts = [tag("rect", width=percent(nbytes / most), height=12, rx=2, class_=when)
                 for nbytes, when in ((one.peak_nbytes, "peak"), (one.last_nbytes, "last"))]  # fmt: skip
        bar = tag("svg", titled(text), *parts, width="100%", height=12, role="img", aria_label=text)
        rows.append(tag("tr", tag("th", one.node, scope="row"), tag("td", bar, class_="wide"),
                        tag("td", show_bytes(one.peak_nbytes))))  # fmt: skip
    note = "What checkpoints took of each node's memory, at most: own slots, copies or parity of others, shares."
    if len(kept) < len(story.memory):
        rest = sorted(one.peak_nbytes for one in story.memory if one not in shown)
        few, most_ = show_bytes(rest[0]), show_bytes(rest[-1])
        took = few if few == most_ else f"{few} to {most_}"
        note += f" Here are the {len(kept)} nodes with the most; each of the other {len(rest)} took {took}."
    heads = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in ("Node", "Memory", "At most"))),
                class_="unseen")  # fmt: skip
    return tag("div", tag("p", note, class_="note"), tag("table", heads, tag("tbody", *rows), class_="bars"))


def layout(story: JobHistory) -> Markup:
    """What the newest launch said of itself when it started."""
    started = story.started
    if started is None:
        return tag("p", "The log has no start.", class_="note")
    pairs = [
        ("Redundancy", started.text("redundancy")),
        ("Survives the loss of", _list(started.text("survives"))),
        ("Sent by", started.text("transport")),
        ("Courier", started.text("courier")),
        ("Drained", _drained(story)),
    ]
    return tag("dl", *(part for name, text in pairs if text for part in (tag("dt", name), tag("dd", text))))


def _list(text: str) -> str:
    parts = [part.strip() for part in text.split(";") if part.strip()]
    return tag("ul", *(tag("li", part) for part in parts)) if len(parts) > 1 else text


def _drained(story: JobHistory) -> str:
    drains = story.drains
    if not drains.count and not drains.failed:
        return "nothing"
    text = f"{many(drains.count, 'step')}, {show_seconds(drains.seconds)} each, {show_bytes(drains.nbytes)} in all"
    text += f"; the newest: {drains.newest:,}, in {drains.path}" if drains.newest is not None else ""
    return text + (f"; {drains.failed} failed" if drains.failed else "")


_ENDS = {"ended": "by itself", "failed": "by an exception", "killed": "ranks went silent", "open": "no end yet"}


def launches(story: JobHistory) -> Markup:
    """What each launch came to."""
    heads = [
        ("Launch", "number and run id"), ("Began (UTC)", ""), ("Lasted", "from its first to its last sign"), ("On", ""),
        ("Steps", "from the one restored to the newest one saved"), ("Commits", ""), ("Ended", ""),
    ]  # fmt: skip
    rows = []
    for number, launch in enumerate(story.launches, 1):
        first, newest = launch.stretches[0].from_step, launch.stretches[-1].newest
        steps = "none" if newest is None else f"{'up' if first is None else f'{first:,}'} to {newest:,}"
        on = f"{many(launch.ranks, 'rank')}, {listed(launch.nodes)}"
        name = tag("div", tag("b", str(number)), " ", tag("code", launch.run))
        commits = f"{sum(1 for _ in launch.commits):,}"
        rows.append((name, show_time(launch.began), lasted(launch.last - launch.began), on, steps, commits,
                     _ENDS[launch.state]))  # fmt: skip
    left_out = len(rows) - _MOST_LAUNCHES
    note = [tag("p", f"The newest {_MOST_LAUNCHES} of {len(rows)}.", class_="note")] if left_out > 0 else []
    return tag("div", *note, table(heads, rows[-_MOST_LAUNCHES:]))


def warnings(story: JobHistory) -> Markup:
    """What was logged for a person, the latest first."""
    if not story.remarks:
        return tag("p", "None.", class_="note")
    items = [
        tag("li", tag("span", one.level.lower(), class_=f"level {'error' if one.level == 'ERROR' else 'warning'}"),
            tag("p", one.text, class_="text"), tag("p", f"{_when(one.first, one.last, one.count)}; {_by(one.ranks)}",
                                                   class_="what"))
        for one in story.remarks[:_MOST_WARNINGS]
    ]  # fmt: skip
    left_out = len(story.remarks) - _MOST_WARNINGS
    note = [tag("p", f"And {left_out} older ones; --json has all.", class_="note")] if left_out > 0 else []
    return tag("div", tag("ul", *items, class_="warnings"), *note)


def _when(first: float, last: float, count: int) -> str:
    text = f"{show_time(first)} UTC"
    return text if count == 1 else f"{count:,} times, {text} to {clock(last)}"


def _by(ranks: set[int]) -> str:
    return named(ranks) if len(ranks) <= 16 else f"{len(ranks)} ranks"


def reading(story: JobHistory) -> Markup:
    """What was read, and what cannot be known from it."""
    files = story.log.files
    lines = f"{many(sum(file.events for file in files), 'event')} in {many(len(files), 'file')}: "
    return tag("div", tag("p", lines + listed([file.path for file in files], 6) + ".", class_="note"),
               tag("ul", *(tag("li", text) for text in _caveats(story)), class_="notes"))  # fmt: skip


def _caveats(story: JobHistory) -> Iterator[str]:
    yield from story.notes
    yield ("Only saves and commits tell of progress. What was trained after the newest save of a launch is lost with "
           "it, and counted as time, not as steps.")  # fmt: skip
    yield ("A process that is killed says nothing: a failure came some time after the last sign before it, and that "
           "time counts as down.")  # fmt: skip
    yield "What protecting and draining cost beside training, in cores and bandwidth, is part of the time of training."
    yield "Times are of the clocks of the nodes."
