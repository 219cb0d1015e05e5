"""The commands ``mlflash export`` and ``mlflash import``: an open checkpoint → a `Whole` on rank 0 → files."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import runpy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import click
import msgspec
import numpy as np

from ..channel.ranks import Collectives
from ..channel.wanted_parts import WantedPart, items
from ..checkpointer.checkpointer import Checkpointer
from ..config import Config
from ..drain.index import first_names
from ..errors import ConfigError, CorruptSlot, MlflashError, StepNotFound
from ..memory.inventory import WantedStep
from ..memory.node_directory import clean, jobs_of
from ..mpi.world import World
from ..restore.open_in_directory import OpenInDirectory
from ..restore.open_in_memory import OpenCheckpoint
from ..state import boxes
from ..state.flatten import flatten
from ..state.leaves import Entry, Tree, apart, from_bytes, item_nbytes, live_bytes, ties_of
from ..state.old_ranks import OldRank, Spot
from ..state.paths import plain_leaves
from ..state.plain_values import encode_key
from ..storage import dcp_plans
from ..storage.dcp_plans import TOLD
from ..storage.store import Store, open_store
from ..storage.whole_state import Whole, Written
from ..text import listed, many, read_bytes, show_bytes
from . import completion, export_formats, on_disk
from .jobs import choose_job
from .options import job_options, json_option, memory_option
from .run_on_ranks import Answer, together

_FORMATS = ("dcp", "safetensors", "torch", "hdf5")
Spots = dict[str, list[Spot]]
"""Where each tensor is in the structures of the old ranks."""
Convert = Callable[[dict[str, Any]], Any]
"""Gets tensors and arrays by name. Returns a state, such as other tensors by name."""


def _step(_: click.Context, __: click.Parameter, text: str) -> int | None:
    if text == "newest":
        return None
    if text.isdecimal():
        return int(text)
    raise click.BadParameter("give a step or 'newest'")


def _function(context: click.Context, option: click.Parameter, text: str | None) -> Convert | None:
    """Load a function from a file: ``convert.py:to_llama``."""
    if text is None:
        return None
    path, _, name = text.rpartition(":")
    if not Path(path).is_file():
        raise click.BadParameter("give a Python file and a function in it, such as convert.py:to_llama")
    if not callable(function := runpy.run_path(path).get(name)):
        raise click.BadParameter(f"{path} has no function {name}")
    return cast(Convert, function)


@click.command("export")
@click.argument("step", callback=_step, shell_complete=completion.steps_or_newest)
@click.argument("out", shell_complete=completion.directories)
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
@together
def export(world: World, config: Config, job: str | None, step: int | None, out: str, form: str, place: str | None,
           keep: tuple[str, ...], drop: tuple[str, ...], rename: tuple[tuple[str, str], ...], convert: Convert | None,
           name: str | None, flat: bool, shard_size: str, hf_config: str | None) -> Answer | None:  # fmt: skip
    """Write the checkpoint of STEP, a number or "newest", to OUT in a stock format, with every tensor whole.

    \b
    mlflash export newest out/ --to safetensors --keep "model.*" --directory /lustre/me/run42
    srun --ntasks-per-node=1 mlflash export 40 out/ --to dcp --from memory

    OUT is a directory or a URL that is empty or does not exist yet. To read from memory, start it on each node, after
    the job has ended.
    """
    selection, store = Selection(keep, drop, rename, convert), open_store(out)
    file = name or ("state.h5" if form == "hdf5" else "pytorch_model.bin" if flat else "state.pt")
    shard_nbytes = read_bytes(shard_size)
    if existing := world.broadcast(store.names()[:1] if world.rank == 0 else [], 0):
        raise click.UsageError(f"{store.path} is not empty: {existing[0]}")

    def write(whole: Whole) -> Written:
        whole = selection.of(whole)
        whole = tensors_by_name(whole) if flat and form == "torch" else whole
        store.make()
        configuration = {} if hf_config is None else export_formats.copy_config(hf_config, store)
        written = _write(form, whole, store, file, shard_nbytes)
        return dataclasses.replace(written, files={**configuration, **written.files},
                                   left_out=(*whole.left_out, *written.left_out))  # fmt: skip

    stored = on_disk.look_into(world, None if place == "memory" else config.directory)
    wanted, drained = WantedStep(step), () if stored is None else stored.listed
    fitting = [checkpoint for checkpoint in drained if wanted.fits(checkpoint.step, checkpoint.verdict)]
    if stored is not None and fitting:
        opened = OpenInDirectory(world, open_store(stored.path), fitting[0], TOLD)
        with contextlib.closing(opened):
            exported, written = opened.step, export_whole(world, opened, write)
    elif place == "directory":
        raise click.ClickException(f"{config.directory} has no such step" if config.directory else
                                   "--from directory needs --directory")  # fmt: skip
    else:
        exported, written = _from_memory(world, config, choose_job(world, config, job, is_live=False), step, write)
    if written is None:
        return None
    nbytes = sum(written.files.values())
    document = {"step": exported, "format": form, "path": store.path, "nbytes": nbytes, **dataclasses.asdict(written)}
    words = f"step {exported} was written to {store.path}: {many(written.tensors, 'tensor')}, {show_bytes(nbytes)}"
    return Answer(True, document, words + (f"\nleft out: {listed(written.left_out, 5)}" if written.left_out else ""))


def _write(form: str, whole: Whole, store: Store, file: str, shard_nbytes: int) -> Written:
    if form == "safetensors":
        return export_formats.write_safetensors(whole, store, shard_nbytes)
    if form == "dcp":
        return export_formats.write_dcp(whole, store)
    return (export_formats.write_torch if form == "torch" else export_formats.write_hdf5)(whole, store, file)


def _from_memory(world: World, config: Config, job: str, step: int | None, write: Callable[[Whole], Written]
                 ) -> tuple[int, Written | None]:  # fmt: skip
    if not world.any_of(job in jobs_of(config.memory)):
        missing = f"not in {config.directory}" if config.directory else "no --directory was given"
        raise click.ClickException(f"there is no such step: {missing}, and job {job} holds nothing in {config.memory}")
    with Checkpointer(config.directory, job=job, memory=config.memory, redundancy="none", reserve=0,
                      heartbeat=False) as checkpointer:  # fmt: skip
        adapting = checkpointer.adapting
        opened = adapting.open(step, told=TOLD)
        if opened is None:
            raise StepNotFound("memory has nothing that can be exported")
        with contextlib.closing(opened):
            return opened.step, export_whole(adapting.ranks, opened, write)


@click.command("import")
@click.argument("source", shell_complete=completion.directories)
@click.option("--to", "directory", required=True, metavar="DIR", shell_complete=completion.directories,
              help="Directory or URL that the job drains to.")  # fmt: skip
@click.option("--step", type=click.IntRange(0), required=True, help="Training step of the checkpoint.")
@click.option("--trust-pickle", is_flag=True,
              help="Unpickle what SOURCE holds, which can run code: only if you trust its author.")  # fmt: skip
@memory_option
@json_option
@together
def import_(world: World, config: Config, _: str | None, source: str, step: int, trust_pickle: bool) -> Answer:
    """Make a checkpoint in DIR from SOURCE, a directory that torch.distributed.checkpoint wrote.

    \b
    mlflash import dcp/step-900 --to /lustre/me/run42 --step 900

    SOURCE may also have safetensors with whole tensors. Start one process, without mpiexec. The next restore takes this
    checkpoint as the newest, on any number of ranks.
    """
    from .export_imports import read_dcp

    if world.size > 1:
        raise click.UsageError(f"start one process, not {world.size}: one process imports everything")
    state, name = read_dcp(source, trust_pickle), f"import-{os.getpid()}"
    try:
        with Checkpointer(config.directory, job=name, memory=config.memory, redundancy="none", strict=True) as ckpt:
            ckpt.save(step, state).wait()
            drain = ckpt.drain().wait()
    finally:
        clean(config.memory, name)
    return Answer(True, {"step": step, "path": drain.path, "nbytes": drain.nbytes},
                  f"step {step} was written to {drain.path}: {show_bytes(drain.nbytes)}")  # fmt: skip


# An open checkpoint → a `Whole` on the rank that exports


def export_whole(world: Collectives, opened: OpenCheckpoint, write: Callable[[Whole], Any]) -> Any:
    """Let the first rank export a checkpoint. Return its result there, and None on the others. Collective.

    Args:
        write: writes the checkpoint. If ranks had different values, it gets those of the lowest rank.

    Raises:
        MlflashError, OSError: the export failed on the first rank. The other ranks raise an MlflashError.
    """
    if world.rank:
        while world.broadcast(None, 0):
            opened.read(())
        return world.raise_together(None)
    error: BaseException | None = None
    result: Any = None
    try:
        result = write(open_whole(world, opened))
    except Exception as problem:  # the other ranks must learn of it
        error = problem
    world.broadcast(False, 0)
    shared = error if error is None or isinstance(error, MlflashError) else MlflashError(f"export failed: {error}")
    try:
        world.raise_together(shared)
    except MlflashError:
        if error is not None:
            raise error from None
        raise
    return result


def open_whole(world: Collectives, opened: OpenCheckpoint) -> Whole:
    """Describe a checkpoint on the first rank. Its ``read`` is collective: the other ranks are in `export_whole`."""
    is_planned = dcp_plans.is_planned(opened.olds.groups[0].structure.tree)
    whole, spots = _of_plan(opened) if is_planned else _of_state(opened)

    def read(names: Sequence[str]) -> dict[str, np.ndarray]:
        raw = {name: np.empty(whole.entries[name].nbytes, dtype=np.uint8) for name in names}
        parts = [part for name in names for part in _parts(opened, whole.entries[name], spots[name], raw[name])]
        world.broadcast(True, 0)  # now the other ranks read, too
        if not opened.read(parts):
            raise CorruptSlot("parts of the checkpoint cannot be read", step=opened.step)
        return raw

    return dataclasses.replace(whole, read=read)


def _parts(opened: OpenCheckpoint, entry: Entry, spots: Sequence[Spot], raw: np.ndarray) -> list[WantedPart]:
    if not entry.nbytes:
        return []
    olds = opened.olds
    # If the checkpoint comes from memory, nobody has yet compared the tensors that several ranks hold whole.
    own = olds.is_private(spots) or not (olds.compared or olds.is_sharded(spots))
    first = min(int(olds.groups[group].ranks[0]) for group, _ in spots)
    target = items(raw, entry)
    return [WantedPart(part.rank, part.number, part.source, part.shape, target[boxes.box(part.target, part.shape)])
            for part in olds.parts(entry, first, spots, first if own else None) or ()]  # fmt: skip


def _of_state(opened: OpenCheckpoint) -> tuple[Whole, Spots]:
    """Describe a saved state. If ranks had different values, take those of the lowest rank."""
    entries, ties, spots, plain = dict[str, Entry](), dict[str, str](), Spots(), list[Any]()
    tree: Tree | None = None
    name_of = apart((entry.name, entry.mesh) for old in opened.olds.of_structures() for entry in old.entries)
    for old in opened.olds.of_structures():
        names = [name_of(entry.name, entry.mesh) for entry in old.entries]
        for name, entry, first in zip(names, old.entries, ties_of(old.entries), strict=True):
            if name not in entries:
                entries[name] = _whole(entry, name)
                spots[name] = opened.olds.spots_of(entry)
                if names[first] != name:
                    ties[name] = names[first]
        renumbered = _renumbered(old, names, {name: number for number, name in enumerate(entries)}, plain)
        tree = renumbered if tree is None else _merged(tree, renumbered)
    return Whole(entries, ties, tree or ["d", []], plain), spots


def _renumbered(old: OldRank, names: Sequence[str], numbers: Mapping[str, int], plain: list[Any]) -> Tree:
    """Renumber the tree of some ranks for the whole state, and add its plain leaves to ``plain``."""
    values = {number: old.plain[path] for path, number in plain_leaves(old.tree).items()}
    marks = [name.removeprefix(entry.name) for name, entry in zip(names, old.entries, strict=True)]

    def leaf(tag: str, number: int) -> Tree:
        if tag == "e":
            return ["e", numbers[names[number]]]
        plain.append(values[number])
        return ["p", len(plain) - 1]

    def key(code: Any, below: Tree) -> Any:  # tensors of one name on several meshes get a key each
        return f"{code}{marks[below[1]]}" if below[0] == "e" and type(code) is str else code

    return _map(old.tree, leaf, key)


def _of_plan(opened: OpenCheckpoint) -> tuple[Whole, Spots]:
    """Describe the nested state of a DCP plan, as far as the planner kept the place of each part."""
    entries, ties, spots, plain = dict[str, Entry](), dict[str, str](), Spots(), list[Any]()
    paths: dict[str, dcp_plans.Path] = {}
    parts: dict[str, Tree] = {}
    left_out: list[str] = []
    for rank, old in opened.olds.items():
        group = opened.olds.group_of(rank)
        index, numbers = dcp_plans.Index.decode(old.content[dcp_plans.INDEX]), dcp_plans.keys_of(old.tree)
        paths |= index.paths()
        names, firsts = dcp_plans.names_of(old.tree, old.entries), first_names(old.entries)
        for key in index.tensors:
            if key not in numbers:
                raise CorruptSlot("a tensor of the plan is not in the slot", tensor=key[0], step=opened.step, rank=rank)
            name, entry = key[0], old.entries[numbers[key]]
            entries.setdefault(name, _whole(entry, name))
            first = names.get(firsts[numbers[key]], name)
            if first != name and first in entries:
                ties.setdefault(name, first)
            if (spot := (group, numbers[key])) not in spots.setdefault(name, []):
                spots[name].append(spot)
        readable = dcp_plans.values(index, old.content[dcp_plans.BYTES])
        left_out += [name for name in index.parts if name not in readable]
        for name, (tree, values) in readable.items():
            parts.setdefault(name, _moved(tree, len(plain)))
            plain += values
    parts |= {name: ["e", number] for number, name in enumerate(entries)}
    tree = _nested({paths.get(name, (name,)): parts[name] for name in (*paths, *parts) if name in parts})
    return Whole(entries, ties, tree, plain, left_out=tuple(sorted(left_out))), spots


def _whole(entry: Entry, name: str) -> Entry:
    nbytes = item_nbytes(entry.kind, entry.dtype) * math.prod(entry.global_shape)
    zero = (0,) * len(entry.global_shape)
    return msgspec.structs.replace(entry, name=name, offset=zero, shape=entry.global_shape, start=0, nbytes=nbytes)


def _map(tree: Tree, leaf: Callable[[str, int], Tree], key: Callable[[Any, Tree], Any] = lambda code, _: code) -> Tree:
    """Replace the leaves of a tree, and the keys of its dicts."""
    tag, rest = tree[0], tree[1]
    if tag in ("e", "p"):
        return leaf(tag, rest)
    if tag in ("o", "k"):
        return [tag, _map(rest, leaf, key), *tree[2:]]
    if tag == "d":
        return ["d", [[key(code, below), _map(below, leaf, key)] for code, below in rest]]
    return [tag, [_map(below, leaf, key) for below in rest]]


def _moved(tree: Tree, by: int) -> Tree:
    return _map(tree, lambda tag, number: [tag, number + by] if tag == "p" else [tag, number])


def _nested(parts: Mapping[dcp_plans.Path, Tree]) -> Tree:
    """Build a nested state. Names are keys of dicts, and numbers are places in lists."""
    inside: dict[str | int, dict[dcp_plans.Path, Tree]] = {}
    for path, tree in parts.items():
        if not path:
            return tree
        inside.setdefault(path[0], {})[path[1:]] = tree
    if inside and all(type(key) is int for key in inside):
        return ["l", [_nested(inside[key]) for key in sorted(inside)]]
    return ["d", [[encode_key(key, ""), _nested(below)] for key, below in inside.items()]]


def _merged(first: Tree, second: Tree) -> Tree:
    """Merge the trees of two ranks. If both have a key, the first counts (pipeline stages have different layers)."""
    if first[0] == second[0] == "k" and first[3] and second[3]:  # of the modules of both
        return ["k", _merged(first[1], second[1]), first[2], _merged(first[3], second[3])]
    if second[0] in ("o", "k"):
        return _merged(first, second[1])
    if first[0] in ("o", "k"):
        return [first[0], _merged(first[1], second), *first[2:]]
    if first[0] != "d" or second[0] != "d":
        return first
    merged = {repr(key): [key, tree] for key, tree in first[1]}
    for key, tree in second[1]:
        known = merged.get(repr(key))
        merged[repr(key)] = [key, tree] if known is None else [known[0], _merged(known[1], tree)]
    return ["d", list(merged.values())]


# Which values of a checkpoint are exported, under which names, and what the user's own function makes of them.


@dataclasses.dataclass(frozen=True)
class Selection:
    """What to export of a checkpoint. It is applied in the order of the attributes.

    Attributes:
        rename: regular expressions, each with what replaces it in names, as ``re.sub`` does.
    """

    keep: Sequence[str] = ()  # patterns such as ``model.*``. Nothing else is exported, unless there are none
    drop: Sequence[str] = ()
    rename: Sequence[tuple[str, str]] = ()
    convert: Convert | None = None  # makes another state of it

    def of(self, whole: Whole) -> Whole:
        """Return what is to be exported: a flat dict by name if anything is selected, else the state as it is.

        Collective over the ranks that read the checkpoint if there is a function, which needs all tensors in memory.

        Raises:
            ConfigError: a pattern fits nothing, or two names become one. The error has pattern or name.
            StateError: the function has returned something that is no state.
        """
        if self.keep or self.drop or self.rename:
            names = [*whole.entries, *plain_leaves(whole.tree)]
            kept = set(_matching(names, self.keep) if self.keep else names).difference(_matching(names, self.drop))
            whole = by_name(whole, _renamed([name for name in names if name in kept], self.rename))
        if self.convert is None:
            return whole
        raw = whole.read([entry.name for entry in whole.own])
        state = self.convert({name: from_bytes(entry, raw[whole.ties.get(name, name)])
                              for name, entry in whole.entries.items()})  # fmt: skip
        return dataclasses.replace(whole_of(state), left_out=(*whole.left_out, *plain_leaves(whole.tree)))


def tensors_by_name(whole: Whole) -> Whole:
    """Return the tensors and arrays of a checkpoint as a flat dict."""
    left_out = (*whole.left_out, *plain_leaves(whole.tree))
    return dataclasses.replace(by_name(whole, {name: name for name in whole.entries}), left_out=left_out)


def by_name(whole: Whole, names: dict[str, str]) -> Whole:
    """Return some values of a checkpoint as a flat dict under new names."""
    places = plain_leaves(whole.tree)
    entries = {new: msgspec.structs.replace(whole.entries[old], name=new) for old, new in names.items()
               if old in whole.entries}  # fmt: skip
    plain = {new: whole.plain[places[old]] for old, new in names.items() if old not in whole.entries}
    olds = {new: whole.ties.get(old, old) for old, new in names.items() if old in whole.entries}
    first: dict[str, str] = {}
    ties = {new: other for new, old in olds.items() if (other := first.setdefault(old, new)) != new}
    leaves = [[encode_key(name, name), ["e", number]] for number, name in enumerate(entries)]
    leaves += [[encode_key(name, name), ["p", number]] for number, name in enumerate(plain)]

    def read(wanted: Sequence[str]) -> dict[str, np.ndarray]:
        raw = whole.read([olds[name] for name in wanted])
        return {name: raw[olds[name]] for name in wanted}

    return Whole(entries, ties, ["d", leaves], list(plain.values()), read, whole.left_out)


def _matching(names: Sequence[str], patterns: Iterable[str]) -> set[str]:
    matching: set[str] = set()
    for pattern in patterns:
        fitting = {name for name in names if name == pattern or fnmatchcase(name, pattern)}
        if not fitting:
            raise ConfigError("nothing in this checkpoint has a name like this: `mlflash inspect STEP` lists the names",
                              expected=", ".join(names[:3]) + ", ...", found=pattern)  # fmt: skip
        matching |= fitting
    return matching


def _renamed(names: Collection[str], rules: Iterable[tuple[str, str]]) -> dict[str, str]:
    renamed = {name: name for name in names}
    for pattern, new in rules:
        try:
            after = {name: re.sub(pattern, new, now) for name, now in renamed.items()}
            fits = any(re.search(pattern, now) for now in renamed.values())
        except (re.error, IndexError) as error:
            raise ConfigError(f"this cannot rename: {error}", found=f"{pattern} {new}") from None
        if not fits:
            raise ConfigError("nothing to export has a name like this: `mlflash inspect STEP` lists the names",
                              expected=", ".join(list(renamed.values())[:3]) + ", ...", found=pattern)  # fmt: skip
        renamed = after
    first: dict[str, str] = {}
    for name, new in renamed.items():
        if (other := first.setdefault(new, name)) != name:
            raise ConfigError(f"{other} and {name} would get the same name", tensor=new)
    return renamed


def whole_of(state: Any) -> Whole:
    """Describe a live state. Raises StateError if this is no state."""
    flat = flatten(state)
    names = [entry.name for entry in flat.structure.entries]
    values = dict(zip(names, flat.values, strict=True))
    ties = {names[number]: names[tie] for number, tie in enumerate(flat.structure.ties) if tie >= 0}
    return Whole(dict(zip(names, flat.structure.entries, strict=True)), ties, flat.structure.tree, flat.plain,
                 lambda wanted: {name: live_bytes(values[name]) for name in wanted})  # fmt: skip
