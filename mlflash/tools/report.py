"""The command ``mlflash report``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from ..errors import ConfigError
from . import shell_completion
from .options import json_option


@click.command()
@click.argument("logs", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False),
                shell_complete=shell_completion.files)  # fmt: skip
@click.option("--output", "-o", type=click.Path(dir_okay=False), metavar="FILE", shell_complete=shell_completion.files,
              help="File to write the page to.  [default: report.html; none with --json]")  # fmt: skip
@json_option
def report(logs: tuple[str, ...], output: str | None, as_json: bool) -> None:
    """Make one HTML page from event logs: launches, failures, recoveries, and where the time went.

    \b
    mlflash report events.jsonl -o report.html
    mlflash report events.jsonl run.jsonl

    The name of one file stands for the files of the other nodes, too. If you add the journal of `mlflash run
    --keep-alive`, the page also shows ranks that were replaced in place.
    """
    from ..text import many
    from .report_history import job_history
    from .report_log import files_of, read
    from .report_page import page

    try:
        log = read(files_of(logs))
        if not log.events:
            raise click.ClickException(f"no event in {', '.join(logs)}: give the event logs of the ranks; the journal "
                                       "of `mlflash run` alone is not enough")  # fmt: skip
        history = job_history(log)
        if as_json:
            click.echo(json.dumps(history.numbers, indent=1))
        if as_json and output is None:
            return
        path = Path(output or "report.html")
        # A browser that shows the old page may reload it at any time.
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_text(page(history), encoding="utf-8", errors="replace")
        unfinished.replace(path)
    except (ConfigError, OSError) as error:
        raise click.ClickException(str(error)) from None
    numbers = history.numbers
    in_place = f"{many(len(numbers['recoveries']), 'loss')} recovered in place, " if numbers["recoveries"] else ""
    click.echo(f"{path}: {many(len(numbers['launches']), 'launch')}, {many(len(numbers['failures']), 'failure')}, "
               f"{in_place}goodput {100 * numbers['goodput']:.1f} %", err=as_json)  # fmt: skip
