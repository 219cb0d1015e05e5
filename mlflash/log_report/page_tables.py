"""The tables of the page: failures, memory, the layout, launches, warnings, and the log files."""

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
    """Make a table that becomes a list of cards on a narrow screen.

    Args:
        heads: name and meaning of each column.
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
    """Make the table of failures: what went silent when, and where training continued."""
    if not story.failures:
        return tag("p", "None: every launch but the newest one ended by itself.", class_="note")
    heads = [
        ("Failure", "its number in the timeline"),
        ("Last event (UTC)", "last event of the launch; the failure came after it"),
        ("What went silent", "ranks without events while others still had some, or all ranks; and nodes that the next "
                             "launch no longer had"),
        ("Continued from", "the restored step, and where ranks found it"),
        ("Steps lost", "from the restored step to the newest one that any rank had saved"),
        ("Training lost", "time from the save of the restored step to the last event"),
        ("Until training", "from the last event to the first event of the next launch, plus the time until all ranks "
                           "had restored"),
    ]  # fmt: skip
    rows = [
        (tag("b", str(number)), show_time(failure.time), _silent(story, failure), _back(failure),
         _steps_lost(failure), lasted(failure.lost_s),
         f"{lasted(failure.down_s)} + {lasted(failure.recovery_s)}" if failure.went_on else "-")
        for number, failure in enumerate(story.failures, 1)
    ]  # fmt: skip
    return tag("div", table(heads, rows))


def recoveries(story: JobHistory) -> Markup:
    """Make the table of ranks that were lost and replaced, with the time it took."""
    heads = [
        ("Recovery", "its number in the timeline"), ("Known (UTC)", "when the loss was known"),
        ("Lost", "ranks, and what happened to their processes"),
        ("Continued from", "the newest committed step, to which all ranks went back"),
        ("Steps lost", "from the restored step to the newest one that any rank had saved"),
        ("Training lost", "time from the save of the restored step to the loss"),
        ("Until training", "from the known loss until all ranks trained again, and how the slowest rank spent it"),
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
    """Make two lines. The second may be missing."""
    return tag("div", what, *((tag("br"), tag("span", more, class_="what")) if more else ()))


def _steps_lost(failure: Failure) -> str:
    if not failure.went_on:
        return "-"
    what = f" ({failure.committed_lost:,} of them committed)" if failure.committed_lost else ", not committed"
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
        text = "unknown: all ranks went silent together"
    lines: list[str] = [text]
    if failure.gone:
        swap = f" → {listed(failure.new)}" if failure.new else ", not replaced"
        lines.append(tag("span", f"{listed(failure.gone)}{swap}", class_="swap",
                         title="nodes of this launch → nodes that replaced them in the next launch"))  # fmt: skip
    if failure.emptied:
        lines.append(tag("span", f"memory of {listed(failure.emptied)}", class_="swap",
                         title="no rank found its state in the memory of this node"))  # fmt: skip
    return tag("div", *(part for number, line in enumerate(lines) for part in ([tag("br")] if number else []) + [line]))


def _back(failure: Failure) -> Markup:
    if not failure.went_on:
        return tag("div", "not yet")
    if failure.restored is None:
        return tag("div", "the beginning")
    where = ", ".join(f"{place}: {many(count, 'rank')}" for place, count in list(failure.places.items())[:4])
    return tag("div", tag("b", f"step {failure.restored:,}"), tag("br"), tag("span", where, class_="what"))


_PHASES = {
    "training": "called save later than others",
    "copy": "copied its state to its slot",
    "deferred": "made the copies that save had deferred",
    "checksums": "computed checksums and parity, and checked what it received",
    "transfer": "sent and received copies or parity",
}


def waits(story: JobHistory) -> Markup:
    """Make the table of ranks that commits waited for, with the phase."""
    heads = [
        ("Rank", "rank and node"), ("Late in", "the phase of the save that took it longer than most ranks"),
        ("Commits", "commits with this rank as the slowest one, by more than noise"),
        ("Late by", "delay against most ranks, the median of these commits"), ("At most", ""), ("Last", "step"),
    ]  # fmt: skip
    rows = [
        (_and(f"rank {one.rank}", one.node), _and(one.phase, _PHASES.get(one.phase, "")),
         f"{one.commits:,} of {story.commit.count:,}", show_seconds(one.median_s), show_seconds(one.most_s),
         f"step {one.step:,}")
        for one in story.waited_for[:_MOST_WAITS]
    ]  # fmt: skip
    note = "A commit waits for the slowest rank. The ranks that delayed commits most are at the top."
    if (left_out := len(story.waited_for) - _MOST_WAITS) > 0:
        note += f" {left_out} more are in the output of --json."
    return tag("div", tag("p", note, class_="note"), table(heads, rows))


def memory(story: JobHistory) -> Markup:
    """Make a bar for each node."""
    if not story.memory:
        return tag("p", "The log has no events about memory.", class_="note")
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
    note = "The most memory that checkpoints took on each node: own slots, copies or parity of others, and shares."
    if len(kept) < len(story.memory):
        rest = sorted(one.peak_nbytes for one in story.memory if one not in shown)
        few, most_ = show_bytes(rest[0]), show_bytes(rest[-1])
        took = few if few == most_ else f"{few} to {most_}"
        note += f" These are the {len(kept)} nodes with the most. Each of the other {len(rest)} took {took}."
    heads = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in ("Node", "Memory", "At most"))),
                class_="unseen")  # fmt: skip
    return tag("div", tag("p", note, class_="note"), tag("table", heads, tag("tbody", *rows), class_="bars"))


def layout(story: JobHistory) -> Markup:
    """List what the newest launch logged at its start."""
    started = story.started
    if started is None:
        return tag("p", "The log has no start event.", class_="note")
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


_ENDS = {"ended": "by itself", "failed": "by an exception", "killed": "ranks went silent", "open": "not yet"}


def launches(story: JobHistory) -> Markup:
    """Make the table of launches."""
    heads = [
        ("Launch", "number and run ID"), ("Began (UTC)", ""), ("Lasted", "from first to last event"), ("On", ""),
        ("Steps", "from the restored step to the newest saved one"), ("Commits", ""), ("Ended", ""),
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
    """List the warnings and errors, the latest first."""
    if not story.remarks:
        return tag("p", "None.", class_="note")
    items = [
        tag("li", tag("span", one.level.lower(), class_=f"level {'error' if one.level == 'ERROR' else 'warning'}"),
            tag("p", one.text, class_="text"), tag("p", f"{_when(one.first, one.last, one.count)}; {_by(one.ranks)}",
                                                   class_="what"))
        for one in story.remarks[:_MOST_WARNINGS]
    ]  # fmt: skip
    left_out = len(story.remarks) - _MOST_WARNINGS
    note = [tag("p", f"{left_out} older ones are in the output of --json.", class_="note")] if left_out > 0 else []
    return tag("div", tag("ul", *items, class_="warnings"), *note)


def _when(first: float, last: float, count: int) -> str:
    text = f"{show_time(first)} UTC"
    return text if count == 1 else f"{count:,} times, {text} to {clock(last)}"


def _by(ranks: set[int]) -> str:
    return named(ranks) if len(ranks) <= 16 else f"{len(ranks)} ranks"


def reading(story: JobHistory) -> Markup:
    """List the log files, and what they cannot show."""
    files = story.log.files
    lines = f"{many(sum(file.events for file in files), 'event')} in {many(len(files), 'file')}: "
    return tag("div", tag("p", lines + listed([file.path for file in files], 6) + ".", class_="note"),
               tag("ul", *(tag("li", text) for text in _caveats(story)), class_="notes"))  # fmt: skip


def _caveats(story: JobHistory) -> Iterator[str]:
    yield from story.notes
    yield ("Only saves and commits show progress. Training after the newest save of a launch is lost with the launch. "
           "It counts as time, not as steps.")  # fmt: skip
    yield ("A killed process logs nothing. The failure came some time after the last event, and this time counts as "
           "down.")  # fmt: skip
    yield "The time of training includes what protection and draining cost it in cores and bandwidth."
    yield "All times come from the clocks of the nodes."
