"""The commands ``mlflash export`` and ``mlflash import``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..checkpointer.checkpointer import Checkpointer
from ..command_line import choose_job, shell_completion
from ..command_line.options import job_options, json_option, memory_option, settings
from ..command_line.output import answer
from ..command_line.run_on_ranks import FINE, run_together
from ..config import Config
from ..draining import checkpoint_directory
from ..draining.checkpoint_directory import Listed
from ..errors import StepNotFound
from ..exports import hugging_face
from ..exports.rules import Rule, read_rules
from ..exports.source import Source
from ..human_readable.units import read_bytes, show_bytes
from ..human_readable.wording import listed, many
from ..memory.node_directory import jobs_of
from ..memory.wanted_step import WantedStep
from ..mpi.world import World
from ..restoring.open_in_directory import OpenInDirectory
from ..storage.dcp_plans import TOLD
from ..storage.store import open_store
from ..storage.whole_state import Written

_FORMATS = ("dcp", "safetensors", "torch", "hdf5")


def _step(_: click.Context, __: click.Parameter, text: str) -> int | None:
    if text == "newest":
        return None
    if text.isdecimal():
        return int(text)
    raise click.BadParameter("give a step or 'newest'")


@click.command("export")
@click.argument("step", callback=_step, shell_complete=shell_completion.steps_or_newest)
@click.argument("out", shell_complete=shell_completion.directories)
@click.option("--to", "form", type=click.Choice(_FORMATS), required=True, help="Format to write.")
@click.option("--from", "place", type=click.Choice(["memory", "directory"]),
              help="Where to look.  [default: the directory, then memory]")  # fmt: skip
@click.option("--map", "mapping", type=click.Path(exists=True, dir_okay=False),
              help="File with rules for names and shapes.")  # fmt: skip
@click.option("--name",
              help="torch, hdf5: name of the file.  [default: state.pt, pytorch_model.bin with --flat, "
              "state.h5]")  # fmt: skip
@click.option("--flat", is_flag=True, help="torch: write one dict of tensors by name, as from_pretrained reads it.")
@click.option("--shard-size", default="5GB", show_default=True, help="safetensors: largest size of a file.")
@click.option("--hf-config", type=click.Path(exists=True, file_okay=False),
              help="Directory of a Hugging Face config to copy, too.")  # fmt: skip
@job_options
def export(step: int | None, out: str, form: str, place: str | None, mapping: str | None, name: str | None, flat: bool,
           shard_size: str, hf_config: str | None, directory: str | None, job: str | None, memory: str, as_json: bool
           ) -> None:  # fmt: skip
    """Write a checkpoint to OUT in a stock format, with every tensor whole.

    Use it to take a model out of a checkpoint, for inference or for another tool. STEP is a number or "newest". OUT is
    a directory or a URL that is empty or does not exist yet.

    \b
    mlflash export newest out/ --to safetensors --directory /lustre/me/run42
    srun --ntasks-per-node=1 mlflash export 40 out/ --to dcp --from memory

    To read from memory, start it under srun or mpiexec with one process or more on each node, after the job has ended.
    Exits with 1 if there is no such step or it cannot be written.
    """
    given = settings(memory, job, directory)
    rules = [] if mapping is None else read_rules(Path(mapping).read_text(), mapping)
    write = _writer(form, rules, name, flat, read_bytes(shard_size))

    def work(world: World) -> int:
        store = open_store(out)
        error = None
        if world.rank == 0 and (there := store.names()):
            error = click.UsageError(f"{store.path} is not empty: {there[0]}")
        if (error := world.broadcast(error, 0)) is not None:
            raise error

        def into(source: Source) -> tuple[int, Written, str]:
            store.make()
            written = write(source, store)
            more = {} if hf_config is None else hugging_face.copy_config(hf_config, store)
            left_out = (*source.left_out, *written.left_out)
            written = dataclasses.replace(written, files={**written.files, **more}, left_out=left_out)
            return source.step, written, store.path

        listed = None if place == "memory" else _listed(world, given.directory, step)
        if listed is not None and given.directory is not None:
            drained = OpenInDirectory(world, open_store(given.directory), listed, TOLD)
            try:
                told = Source(world, drained).export(into)
            finally:
                drained.close()
        elif place == "directory":
            raise click.ClickException(f"{given.directory} has no such step" if given.directory else
                                       "--from directory needs --directory")  # fmt: skip
        else:
            name = choose_job.choose(world, given, job, directory)
            if world.agree([int(name not in jobs_of(given.memory))])[0]:
                missing = f"not in {given.directory}" if given.directory else "no --directory was given"
                raise click.ClickException(f"there is no such step: {missing}, and job {name} holds nothing in "
                                           f"{given.memory}")  # fmt: skip
            told = _from_memory(given, name, step, into)
        if told is not None:
            _answer(as_json, form, *told)
        return FINE

    run_together(given, as_json, work)


def _writer(form: str, rules: list[Rule], name: str | None, flat: bool, shard_nbytes: int) -> Callable[..., Written]:
    """Return the function that writes a checkpoint to a store in this format."""
    if form == "safetensors":
        from ..exports import safetensors_files

        return lambda whole, store: safetensors_files.write(whole, store, rules, shard_nbytes=shard_nbytes)
    if form == "torch":
        from ..exports import torch_file

        file = name or ("pytorch_model.bin" if flat else "state.pt")
        return lambda whole, store: torch_file.write(whole, store, rules, file, flat)
    if form == "dcp":
        from ..exports import dcp_directory

        return lambda whole, store: dcp_directory.write(whole, store, rules)
    from ..exports import hdf5_file

    return lambda whole, store: hdf5_file.write(whole, store, rules, name or "state.h5")


def _listed(world: World, directory: str | None, step: int | None) -> Listed | None:
    """Find the newest checkpoint of a step in the directory. Without a step, find the newest that is not marked bad.

    Collective over the world. None if the directory has no such checkpoint.
    """
    wanted = WantedStep(step)
    found: Listed | None = None
    if directory is not None and world.rank == 0:
        listed = checkpoint_directory.list_checkpoints(open_store(directory))
        found = next((one for one in listed if wanted.fits(one.step, one.verdict)), None)
    told: Listed | None = world.broadcast(found, 0)
    return told


def _from_memory(given: Config, job: str, step: int | None, into: Callable[[Source], Any]) -> Any:
    with Checkpointer(given.directory, job=job, memory=given.memory, redundancy="none", reserve=0, courier="thread"
                      ) as checkpointer:  # fmt: skip
        adapting = checkpointer.adapting
        opened = adapting.open(step, told=TOLD)
        if opened is None:
            raise StepNotFound("memory has nothing that can be exported")
        try:
            return Source(adapting.ranks, opened).export(into)
        finally:
            opened.close()


def _answer(as_json: bool, form: str, step: int, written: Written, path: str) -> None:
    nbytes = sum(written.files.values())
    document = {"step": step, "format": form, "path": path, "nbytes": nbytes, "files": dict(written.files),
                "tensors": written.tensors, "ties": dict(written.ties), "left_out": list(written.left_out)}  # fmt: skip
    lines = [f"step {step} was written to {path}: {many(written.tensors, 'tensor')}, {show_bytes(nbytes)}"]
    if written.left_out:
        lines.append(f"left out, as {form} cannot hold them: {listed(written.left_out, 5)}")
    answer(as_json, document, lambda console: console.print("\n".join(lines), soft_wrap=True))


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

    Use it to continue a training in mlflash that saved with PyTorch DCP. SOURCE may also have safetensors with whole
    tensors, as Hugging Face has them. Start one process, without mpiexec.

    \b
    mlflash import dcp/step-900 --to /lustre/me/run42 --step 900

    The next restore takes this checkpoint as the newest, on any number of ranks. The checkpoint passes through the
    memory of this node. The job's retention (keep_last, keep_every) does not delete it.
    """
    from ..exports.imports import read_dcp
    from ..memory.node_directory import clean

    given = settings(memory, None, directory)
    name = f"import-{os.getpid()}"

    def work(world: World) -> int:
        if world.size > 1:
            raise click.UsageError(f"start one process, not {world.size}: one process imports everything")
        state = read_dcp(source, trust_pickle)
        try:
            with Checkpointer(given.directory, job=name, memory=given.memory, redundancy="none", strict=True,
                              courier="thread") as ckpt:  # fmt: skip
                ckpt.save(step, state).wait()
                drain = ckpt.drain().wait()
        finally:
            clean(given.memory, name)
        document = {"step": step, "path": drain.path, "nbytes": drain.nbytes}
        text = f"step {step} was written to {drain.path}: {show_bytes(drain.nbytes)}"
        answer(as_json, document, lambda console: console.print(text, soft_wrap=True))
        return FINE

    run_together(given, as_json, work)
