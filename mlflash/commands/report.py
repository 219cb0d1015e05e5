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
        raise click.BadParameter("takes some time: more than 0 s", param=option)
    return found


@click.command()
@click.argument("logs", nargs=-1, required=True, type=_FILE, shell_complete=shell_completion.files)
@click.option("--output", "-o", type=click.Path(dir_okay=False), metavar="FILE", shell_complete=shell_completion.files,
              help="The page. [report.html]")  # fmt: skip
@click.option(
    "--mtbf",
    callback=_seconds,
    help="Mean time between failures of one node, for the interval: 264d, 30000h. [measured]",
)
@json_option
def report(logs: tuple[str, ...], output: str | None, mtbf: float | None, as_json: bool) -> None:
    """Make one page of what happened to a job, from its event logs.

    LOGS are what Checkpointer(log="events.jsonl") wrote; that name stands for the files of the other nodes, too. With
    the journal of `mlflash run --keep-alive` among them ranks that were replaced in place are shown. The page needs no
    network. With --json the same numbers are printed, and a page is made only with -o. Exits with 1
    where there is no event in the logs.
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
        alone = "; the journal of `mlflash run` needs the logs of the ranks beside it" if is_alone else ""
        raise click.ClickException(f"no event in {', '.join(logs)}: {many(lines, 'line')} of something else{alone}")
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
    """Write a file whole or not at all: who has the old one open in a browser may load it again at any time."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8", errors="replace")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
