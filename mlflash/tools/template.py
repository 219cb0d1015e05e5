"""The command ``mlflash template``: the batch scripts of ``slurm/``, which is installed as ``mlflash/slurm``."""

from __future__ import annotations

import importlib.resources
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

from . import completion

_LEAST_S = 420  # Slurm's signal may come 360 s before the end, and a step must be trained by then
_VARIABLE = r"(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\})"  # without the $ before it


class _Template(NamedTuple):
    """What a batch script is for, the file that is written next to it as train.py, and the arguments of that file.

    Without arguments, train.py only starts the user's script, which the user must name.
    """

    line: str
    training: str
    arguments: str = ""


TEMPLATES = {
    "train": _Template("a PyTorch training with a Checkpointer", "train.py", '--checkpoints "$directory"'),
    "array": _Template("several trainings that requeue themselves until they are done", "train.py",
                       '--checkpoints "$directory" --seed "$SLURM_ARRAY_TASK_ID"'),
    "megatron": _Template("Megatron-LM with its local checkpoints in memory", "megatron_train.py"),
    "nemo": _Template("NeMo's training with checkpoints in memory", "nemo_train.py"),
}  # fmt: skip
_NONE = "there are none"
# Words that may be left out, and what holds then.
_LEFT_OUT = {
    "account": "Slurm takes your default account",
    "partition": "Slurm takes its default partition",
    "time": "Slurm takes the partition's default time limit",
    "gpus-per-node": "the job asks for no GPUs",
    "arguments": _NONE,
    "srun-args": _NONE,
}


def _word(_: click.Context, option: click.Parameter, text: str | None) -> str | None:
    if text is not None and not re.fullmatch(r"\w[\w.,+@:-]*", text, re.ASCII):
        raise click.BadParameter("it may have letters, digits and a few signs, but no spaces or quotes", param=option)
    return text


def _time(context: click.Context, option: click.Parameter, text: str | None) -> str | None:
    """Read a time as sbatch does: ``90`` is minutes, ``1-12`` is a day and a half."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d+){0,2})", text or "0-1")
    if match is None:
        raise click.BadParameter("it must be minutes, hours:minutes:seconds, or days-hours", param=option)
    parts = [int(part) for part in match[2].split(":")]
    units = (3600, 60, 1) if match[1] or len(parts) == 3 else (60, 1)
    if int(match[1] or 0) * 86400 + sum(map(lambda part, unit: part * unit, parts, units)) < _LEAST_S:
        raise click.BadParameter("it must be 7 minutes or more: the end of the job needs up to 6", param=option)
    return text


def _words(context: click.Context, option: click.Parameter, text: Any) -> Any:
    for word in (text,) if isinstance(text, str | Path) else text or ():
        if not str(word).isprintable():
            raise click.BadParameter("it has a line break or another unprintable character", param=option)
    return text


@click.command()
@click.argument("name", type=click.Choice(list(TEMPLATES)), required=False)
@click.option("--output", "-o", type=click.Path(file_okay=False, path_type=Path), default=Path(), metavar="DIR",
              callback=_words, shell_complete=completion.directories,
              help="Directory to write the files to.  [default: here]")  # fmt: skip
@click.option("--force", is_flag=True, help="Overwrite existing files, train.py too.")
@click.option("--account", metavar="NAME", callback=_word, help="Slurm account.  [default: your default account]")
@click.option("--partition", metavar="NAME", callback=_word, help="Slurm partition.  [default: Slurm's default]")
@click.option("--nodes", "-N", type=click.IntRange(1), default=2, show_default=True, help="Nodes that train.")
@click.option("--spares", type=click.IntRange(0), default=1, show_default=True,
              help="Nodes that wait to replace a lost one.")  # fmt: skip
@click.option("--ranks-per-node", type=click.IntRange(1), help="Ranks on each node.  [default: --gpus-per-node, or 1]")
@click.option("--gpus-per-node", type=click.IntRange(0), help="GPUs of each node.  [default: none]")
@click.option("--time", metavar="TIME", callback=_time, help="Time limit, as for sbatch.  [default: the partition's]")
@click.option("--job-name", metavar="NAME", callback=_word,
              help="Name in squeue and of the output file.  [default: the template's name]")  # fmt: skip
@click.option("--directory", "-d", type=click.Path(), callback=_words, metavar="DIR",
              shell_complete=completion.directories,
              help="Directory that the job drains to.  [default: JOB-NAME-checkpoints next to the files]")  # fmt: skip
@click.option("--srun-args", metavar="WORDS", callback=_words,
              help="More arguments for srun, for example for a container.")  # fmt: skip
@click.option("--script", metavar="FILE", callback=_words, shell_complete=completion.files,
              help="Your training script, instead of the train.py that the command writes.")  # fmt: skip
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, callback=_words, shell_complete=completion.files)
def template(name: str | None, output: Path, force: bool, **options: Any) -> None:
    """Write the batch script NAME.sbatch, and the train.py that it starts. Without NAME, list the templates.

    \b
    mlflash template train --nodes 8 --gpus-per-node 8 --time 24:00:00 --script my.py -- --out '$directory'

    ARGUMENTS after -- go to the training. They may use the script's own variables, such as $directory.
    """
    if name is None:
        click.echo("\n".join(f"{name:9} {kind.line}" for name, kind in TEMPLATES.items()))
        return
    values = values_of(name, output, **options)
    script = f"{name}.sbatch"
    files = {script: fill(packaged(script), values)}
    if options["script"] is None or not TEMPLATES[name].arguments:
        files["train.py"] = packaged(TEMPLATES[name].training)
    try:
        existing = [file for file in files if os.path.lexists(output / file)]
        if existing and not force:
            raise click.UsageError(f"{output} already has {' and '.join(existing)}: give another --output, or --force "
                                   "to overwrite")  # fmt: skip
        output.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (output / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{error.filename or output} cannot be written: {error.strerror}") from None
    for word, reason in _LEFT_OUT.items():
        if values[word] is None and reason != _NONE:
            click.echo(f"--{word} is left out: {reason}")
    missing = [f"--{word}" for word in ("account", "partition", "time") if values[word] is None]
    if missing and shutil.which("sbatch") is None:
        click.echo(f"Warning: there is no sbatch here. Your cluster may require what {script} does not have: "
                   f"{', '.join(missing)}", err=True)  # fmt: skip
    click.echo(f"written: {' and '.join(files)}; next: sbatch {shlex.quote(str(output / script))}")


def packaged(name: str) -> str:
    """Return the text of a file in the folder slurm/."""
    return importlib.resources.files("mlflash").joinpath("slurm").joinpath(name).read_text(encoding="utf-8")


def values_of(name: str, output: Path, *, nodes: int, spares: int, ranks_per_node: int | None,
              gpus_per_node: int | None, job_name: str | None, directory: str | None,
              srun_args: str | None, script: str | None, arguments: tuple[str, ...], **given: str | None,
              ) -> dict[str, str | None]:  # fmt: skip
    """Return the value of each word between two @ in a template, quoted for a shell. None: it is left out."""
    home, kind = Path(os.path.abspath(output)), TEMPLATES[name]
    directory = directory or str(home / f"{job_name or name}-checkpoints")
    if "://" in directory:
        raise click.UsageError("--directory must be a path, because `mlflash run` writes its journal there, too")
    try:
        shlex.split(srun_args or "")
    except ValueError as error:
        raise click.UsageError(f"--srun-args cannot be split into words: {error}") from None
    words = [word_of_shell(word) for word in arguments]
    if script is None:
        if not kind.arguments:
            raise click.UsageError(f"--script is missing: name the training script that {name}.sbatch starts")
        words = [kind.arguments, *words]
    elif not (os.path.exists(script) or srun_args):
        raise click.UsageError(f"the file of --script does not exist: {script}")
    programs = [os.path.dirname(os.path.abspath(program)) for program in (sys.executable, shutil.which("mlflash"))
                if program]  # fmt: skip
    return {
        **given,
        "job-name": job_name or name,
        "nodes": str(nodes + spares),
        "spares": str(spares),
        "ranks-per-node": str(ranks_per_node or gpus_per_node or 1),
        "gpus-per-node": str(gpus_per_node) if gpus_per_node else None,
        "directory": shlex.quote(os.path.abspath(directory)),
        "train": shlex.quote(str(home / "train.py")),
        "script": shlex.quote(os.path.abspath(script or home / "train.py")),
        "arguments": " ".join(words) or None,
        "srun-args": shlex.quote(srun_args) if srun_args else None,
        "bin": shlex.quote(":".join(dict.fromkeys(programs))),
    }


def fill(text: str, values: Mapping[str, str | None]) -> str:
    """Put values into a template. A line without a value becomes a comment."""
    lines = []
    for line in text.splitlines():
        missing = [word for word in re.findall(r"@([a-z-]+)@", line) if values[word] is None]
        if missing:
            indent = line[: len(line) - len(line.lstrip())]
            line = f"{indent}# --{missing[0]} is left out: {_LEFT_OUT[missing[0]]}."
        lines.append(re.sub(r"@([a-z-]+)@", lambda word: values[word[1]] or "", line))
    return "\n".join(lines) + "\n"


def word_of_shell(word: str) -> str:
    """Quote a word for a shell. The shell still expands variables such as $directory."""
    if not re.search(rf"\${_VARIABLE}", word):
        return shlex.quote(word)
    return '"' + re.sub(rf'[\\"`]|\$(?!{_VARIABLE})', r"\\\g<0>", word) + '"'
