"""The command ``mlflash report``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from ..command_line import shell_completion
from ..command_line.options import json_option
from ..errors import ConfigError

_FILE = click.Path(exists=True, dir_okay=False)


def _seconds(_: click.Context, option: click.Parameter, text: str | None) -> float | None:
    from ..human_readable.units import read_seconds

    try:
        found = None if text is None else read_seconds(text)
    except ConfigError as error:
        raise click.BadParameter(str(error), param=option) from None
    if found == 0:
        raise click.BadParameter("must be longer than 0 s", param=option)
    return found


@click.command()
@click.argument("logs", nargs=-1, required=True, type=_FILE, shell_complete=shell_completion.files)
@click.option("--output", "-o", type=click.Path(dir_okay=False), metavar="FILE", shell_complete=shell_completion.files,
              help="File to write the page to.  [default: report.html; none with --json]")  # fmt: skip
@click.option(
    "--mtbf",
    callback=_seconds,
    help="Mean time between failures of one node, for the advice on the interval: 264d, 30000h.  [default: measured]",
)
@json_option
def report(logs: tuple[str, ...], output: str | None, mtbf: float | None, as_json: bool) -> None:
    """Make one HTML page from event logs: launches, failures, recoveries, and where the time went.

    Use it after a job, or while it runs. LOGS are files that Checkpointer(log="events.jsonl") wrote. The name of one
    file stands for the files of the other nodes, too.

    \b
    mlflash report events.jsonl -o report.html
    mlflash report events.jsonl run.jsonl

    If you add the journal of `mlflash run --keep-alive`, the page also shows ranks that were replaced in place. The
    page needs no network. With --json the command prints the same numbers, and writes a page only with -o. Exits with 1
    if the logs have no event.
    """
    from ..human_readable.wording import many
    from ..log_report.job_history import tell, to_json
    from ..log_report.page import page
    from ..log_report.read_logs import files_of, read

    try:
        log = read(files_of(logs))
    except OSError as error:
        raise click.ClickException(str(error)) from None
    if not log.events:
        lines = sum(file.lines for file in log.files)
        is_alone = any(file.journal for file in log.files)
        alone = "; give the event logs of the ranks along with the journal of `mlflash run`" if is_alone else ""
        raise click.ClickException(f"no event in {', '.join(logs)}: {many(lines, 'other line')}{alone}")
    story = tell(log, mtbf)
    if as_json:
        click.echo(json.dumps(to_json(story), indent=1))
        if output is None:
            return
    path = Path(output or "report.html")
    try:
        _write(path, page(story))
    except OSError as error:
        raise click.ClickException(str(error)) from None
    in_place = f"{many(len(story.recoveries), 'loss')} recovered in place, " if story.recoveries else ""
    click.echo(
        f"{path}: {many(len(story.launches), 'launch')}, {many(len(story.failures), 'failure')}, {in_place}"
        f"goodput {100 * story.account.goodput:.1f} %", err=as_json
    )  # fmt: skip


def _write(path: Path, text: str) -> None:
    """Write a file completely or not at all. A browser that shows the old one may reload it at any time."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8", errors="replace")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
