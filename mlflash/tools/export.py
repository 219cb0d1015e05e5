"""The commands ``mlflash export`` and ``mlflash import``."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

import click

from ..checkpointer.checkpointer import Checkpointer
from ..config import Config
from ..errors import StepNotFound
from ..memory.inventory import WantedStep
from ..memory.node_directory import jobs_of
from ..mpi.world import World
from ..restore.open_in_directory import OpenInDirectory
from ..storage.dcp_plans import TOLD
from ..storage.store import Store, open_store
from ..storage.whole_state import Whole, Written
from ..text import listed, many, read_bytes, show_bytes
from . import choose_job, export_safetensors, on_disk, shell_completion
from .export_whole import Convert, Selection, tensors_by_name
from .export_whole import export as export_whole
from .options import job_options, json_option, memory_option, settings
from .output import answer
from .run_on_ranks import FINE, run_together

_FORMATS = ("dcp", "safetensors", "torch", "hdf5")


def _step(_: click.Context, __: click.Parameter, text: str) -> int | None:
    if text == "newest":
        return None
    if text.isdecimal():
        return int(text)
    raise click.BadParameter("give a step or 'newest'")


def _function(_: click.Context, __: click.Parameter, text: str | None) -> Convert | None:
    """Load a function from a file: ``convert.py:to_llama``."""
    if text is None:
        return None
    path, name = text.rpartition(":")[::2]
    spec = importlib.util.spec_from_file_location("mlflash_convert", path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise click.BadParameter("give a Python file and a function in it, such as convert.py:to_llama")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(function := getattr(module, name, None)):
        raise click.BadParameter(f"{path} has no function {name}")
    return cast(Convert, function)


@click.command("export")
@click.argument("step", callback=_step, shell_complete=shell_completion.steps_or_newest)
@click.argument("out", shell_complete=shell_completion.directories)
@click.option("--to", "form", type=click.Choice(_FORMATS), required=True, help="Format to write.")
@click.option("--from", "place", type=click.Choice(["memory", "directory"]),
              help="Where to look.  [default: the directory, then memory]")  # fmt: skip
@click.option("--keep", multiple=True, metavar="PATTERN", help='Export only what has such a name: "model.*".')
@click.option("--drop", multiple=True, metavar="PATTERN", help="Do not export what has such a name.")
@click.option("--rename", multiple=True, nargs=2, metavar="REGEX NEW",
              help="Replace what REGEX matches in a name, as re.sub does.")  # fmt: skip
@click.option("--convert", callback=_function, metavar="FILE.py:FUNCTION",
              help="Function that gets tensors by name, and returns what to write.")  # fmt: skip
@click.option("--name",
              help="torch, hdf5: name of the file.  [default: state.pt, pytorch_model.bin with --flat, "
              "state.h5]")  # fmt: skip
@click.option("--flat", is_flag=True, help="torch: write one dict of tensors by name, as from_pretrained reads it.")
@click.option("--shard-size", default="5GB", show_default=True, help="safetensors: largest size of a file.")
@click.option("--hf-config", type=click.Path(exists=True, file_okay=False),
              help="Directory of a Hugging Face config to copy, too.")  # fmt: skip
@job_options
def export(step: int | None, out: str, form: str, place: str | None, keep: tuple[str, ...], drop: tuple[str, ...],
           rename: tuple[tuple[str, str], ...], convert: Convert | None, name: str | None, flat: bool, shard_size: str,
           hf_config: str | None, directory: str | None, job: str | None, memory: str, as_json: bool
           ) -> None:  # fmt: skip
    """Write the checkpoint of STEP, a number or "newest", to OUT in a stock format, with every tensor whole.

    \b
    mlflash export newest out/ --to safetensors --keep "model.*" --directory /lustre/me/run42
    srun --ntasks-per-node=1 mlflash export 40 out/ --to dcp --from memory

    OUT is a directory or a URL that is empty or does not exist yet. To read from memory, start it on each node, after
    the job has ended.
    """
    given = settings(memory, job, directory)
    selection = Selection(keep, drop, rename, convert)
    file = name or ("state.h5" if form == "hdf5" else "pytorch_model.bin" if flat else "state.pt")
    shard_nbytes = read_bytes(shard_size)

    def work(world: World) -> int:
        store = open_store(out)
        if there := world.broadcast(store.names()[:1] if world.rank == 0 else [], 0):
            raise click.UsageError(f"{store.path} is not empty: {there[0]}")

        def write(whole: Whole) -> Written:
            whole = selection.of(whole)
            whole = tensors_by_name(whole) if flat and form == "torch" else whole
            store.make()
            config = {} if hf_config is None else export_safetensors.copy_config(hf_config, store)
            written = _write(form, whole, store, file, shard_nbytes)
            return dataclasses.replace(written, files={**config, **written.files},
                                       left_out=(*whole.left_out, *written.left_out))  # fmt: skip

        stored = on_disk.look_into(world, None if place == "memory" else given.directory)
        wanted, drained = WantedStep(step), () if stored is None else stored.listed
        fitting = [checkpoint for checkpoint in drained if wanted.fits(checkpoint.step, checkpoint.verdict)]
        if stored is not None and fitting:
            opened = OpenInDirectory(world, open_store(stored.path), fitting[0], TOLD)
            with contextlib.closing(opened):
                exported, written = opened.step, export_whole(world, opened, write)
        elif place == "directory":
            raise click.ClickException(f"{given.directory} has no such step" if given.directory else
                                       "--from directory needs --directory")  # fmt: skip
        else:
            name_of_job = choose_job.choose(world, given, job, is_live=False)
            exported, written = _from_memory(world, given, name_of_job, step, write)
        if written is not None:
            _answer(as_json, form, exported, written, store.path)
        return FINE

    run_together(given, as_json, work)


def _write(form: str, whole: Whole, store: Store, file: str, shard_nbytes: int) -> Written:
    if form == "safetensors":
        return export_safetensors.write(whole, store, shard_nbytes)
    from . import export_formats  # loads torch

    if form == "dcp":
        return export_formats.write_dcp(whole, store)
    return (export_formats.write_torch if form == "torch" else export_formats.write_hdf5)(whole, store, file)


def _from_memory(world: World, given: Config, job: str, step: int | None, write: Callable[[Whole], Written]
                 ) -> tuple[int, Written | None]:  # fmt: skip
    if not world.any_of(job in jobs_of(given.memory)):
        missing = f"not in {given.directory}" if given.directory else "no --directory was given"
        raise click.ClickException(f"there is no such step: {missing}, and job {job} holds nothing in {given.memory}")
    with Checkpointer(given.directory, job=job, memory=given.memory, redundancy="none", reserve=0,
                      heartbeat=False) as checkpointer:  # fmt: skip
        adapting = checkpointer.adapting
        opened = adapting.open(step, told=TOLD)
        if opened is None:
            raise StepNotFound("memory has nothing that can be exported")
        with contextlib.closing(opened):
            return opened.step, export_whole(adapting.ranks, opened, write)


def _answer(as_json: bool, form: str, step: int, written: Written, path: str) -> None:
    nbytes = sum(written.files.values())
    document = {"step": step, "format": form, "path": path, "nbytes": nbytes, **dataclasses.asdict(written)}
    text = f"step {step} was written to {path}: {many(written.tensors, 'tensor')}, {show_bytes(nbytes)}"
    if written.left_out:
        text += f"\nleft out: {listed(written.left_out, 5)}"
    answer(as_json, document, lambda console: console.print(text, soft_wrap=True))


@click.command("import")
@click.argument("source", shell_complete=shell_completion.directories)
@click.option("--to", "directory", required=True, metavar="DIR", shell_complete=shell_completion.directories,
              help="Directory or URL that the job drains to.")  # fmt: skip
@click.option("--step", type=click.IntRange(0), required=True, help="Training step of the checkpoint.")
@click.option("--trust-pickle", is_flag=True,
              help="Unpickle what SOURCE holds, which can run code: only if you trust its author.")  # fmt: skip
@memory_option
@json_option
def import_(source: str, directory: str, step: int, trust_pickle: bool, memory: str, as_json: bool) -> None:
    """Make a checkpoint in DIR from SOURCE, a directory that torch.distributed.checkpoint wrote.

    \b
    mlflash import dcp/step-900 --to /lustre/me/run42 --step 900

    SOURCE may also have safetensors with whole tensors. Start one process, without mpiexec. The next restore takes this
    checkpoint as the newest, on any number of ranks.
    """
    from ..memory.node_directory import clean
    from .export_imports import read_dcp

    given = settings(memory, None, directory)
    name = f"import-{os.getpid()}"

    def work(world: World) -> int:
        if world.size > 1:
            raise click.UsageError(f"start one process, not {world.size}: one process imports everything")
        state = read_dcp(source, trust_pickle)
        try:
            with Checkpointer(given.directory, job=name, memory=given.memory, redundancy="none", strict=True) as ckpt:
                ckpt.save(step, state).wait()
                drain = ckpt.drain().wait()
        finally:
            clean(given.memory, name)
        document = {"step": step, "path": drain.path, "nbytes": drain.nbytes}
        text = f"step {step} was written to {drain.path}: {show_bytes(drain.nbytes)}"
        answer(as_json, document, lambda console: console.print(text, soft_wrap=True))
        return FINE

    run_together(given, as_json, work)
