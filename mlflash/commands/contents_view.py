"""What a checkpoint holds, for people and programs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..command_line.output import new_table
from ..human_readable.units import show_bytes
from ..human_readable.wording import many, named
from ..inspection.checkpoint_contents import Contents, Shard
from ..inspection.provenance_check import Found, describe, versions_of
from ..inspection.tensor_statistics import Statistics

if TYPE_CHECKING:
    from rich.console import Console

_LONGEST = 100  # of a plain leaf, characters


@dataclasses.dataclass
class Shown:
    """A checkpoint that is shown.

    Attributes:
        step, ranks: its step and number of ranks.
        source: "memory", or the path in the directory.
        about: a line about it.
        missing: ranks that have no slot here.
        found: its contents.
        said: its provenance. None if the checkpoint is in memory.
    """

    step: int
    ranks: int
    source: str
    about: str
    missing: tuple[int, ...]
    found: Contents
    said: Found | None = None


def _groups(shards: Sequence[Shard]) -> Iterator[tuple[str, list[Shard]]]:
    """Yield the name and the shards of each tensor. Shards of one tensor have the same name, dtype and shape."""
    found: dict[tuple[Any, ...], list[Shard]] = {}
    for shard in shards:
        entry = shard.entry
        found.setdefault((entry.name, entry.kind, entry.dtype, entry.global_shape), []).append(shard)
    for (name, *_), those in found.items():
        yield name, those


def _boxes(those: Sequence[Shard]) -> dict[tuple[Any, ...], list[Shard]]:
    """Group the shards of a tensor by their place in it."""
    found: dict[tuple[Any, ...], list[Shard]] = {}
    for shard in those:
        found.setdefault((shard.entry.offset, shard.entry.shape), []).append(shard)
    return found


def _held(those: Sequence[Shard]) -> str:
    """Say which ranks hold a tensor."""
    ranks = named({shard.rank for shard in those})
    whole = all(shard.entry.shape == shard.entry.global_shape for shard in those)
    return f"whole, {ranks}" if whole else f"{len(_boxes(those))} parts, {ranks}"


def _whole_numbers(those: Sequence[Shard]) -> Statistics | None:
    """Join the statistics of the shards of a tensor. Each part counts once."""
    joined = Statistics()
    for alike in _boxes(those).values():
        numbers = next((shard.numbers for shard in alike if shard.numbers is not None), None)
        if numbers is None:
            return None
        joined.join(numbers)
    return joined


def _differ(those: Sequence[Shard]) -> bool:
    """Say whether ranks hold different bytes of the same part of a tensor."""
    return any(len({shard.numbers.check for shard in alike if shard.numbers}) > 1 for alike in _boxes(those).values())


def to_json(shown: Shown) -> dict[str, Any]:
    """Return the checkpoint as plain values. Not collective."""
    tensors = []
    for name, those in _groups(shown.found.shards):
        first = those[0].entry
        numbers = _whole_numbers(those) if those[0].numbers is not None and not _differ(those) else None
        tensors.append({
            "name": name, "kind": first.kind, "dtype": first.dtype, "shape": list(first.global_shape),
            "nbytes": sum(part[0].entry.nbytes for part in _boxes(those).values()),
            "statistics": None if numbers is None else {k: v for k, v in numbers.to_json().items() if k != "check"},
            "shards": [_shard_to_json(shard) for shard in those],
        })  # fmt: skip
    plain = {name: _plain(value) for name, value in shown.found.plain.items()}
    said = (shown.found.provenance or None) if shown.said is None else shown.said.said
    return {"step": shown.step, "ranks": shown.ranks, "source": shown.source, "missing_ranks": list(shown.missing),
            "tensors": tensors, "plain": plain, "provenance": said}  # fmt: skip


def _shard_to_json(shard: Shard) -> dict[str, Any]:
    return {
        "rank": shard.rank, "offset": list(shard.entry.offset), "shape": list(shard.entry.shape),
        "nbytes": shard.entry.nbytes, "node": shard.node or None,
        "bytes": [dataclasses.asdict(run) for run in shard.runs],
        "statistics": None if shard.numbers is None else shard.numbers.to_json(),
    }  # fmt: skip


def _plain(value: Any) -> Any:
    """Return a plain leaf as a JSON value if there is one, else as its ``repr``."""
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    return value if type(value) is float and math.isfinite(value) else repr(value)


def show(console: Console, shown: Shown, closely: bool) -> None:
    """Print a line for each tensor. With ``closely`` print each of its shards."""
    console.print(f"step {shown.step} of {many(shown.ranks, 'rank')}, from {shown.source}; {shown.about}")
    if shown.said is not None:
        _show_provenance(console, shown.said)
    elif its := shown.found.provenance:
        given = f"; {json.dumps(its['given'], ensure_ascii=False)}" if its["given"] else ""
        console.print(f"provenance: {versions_of(its)}{given}", markup=False, soft_wrap=True)
    if shown.missing:
        console.print(f"no slot of {named(shown.missing)} is on the nodes that were read", style="yellow")
    if closely:
        for _, those in _groups(shown.found.shards):
            _show_closely(console, those)
    elif shown.found.shards:
        table = new_table("tensor", "dtype", "shape", ">size", "held")
        for name, those in _groups(shown.found.shards):
            first, nbytes = those[0].entry, sum(part[0].entry.nbytes for part in _boxes(those).values())
            table.add_row(name, first.dtype, _shape(first.global_shape), show_bytes(nbytes), _held(those))
        console.print(table)
    for name, value in shown.found.plain.items():
        text = repr(value)
        console.print(f"{name} = {text if len(text) <= _LONGEST else text[:_LONGEST] + '...'}", markup=False)


def _show_provenance(console: Console, said: Found) -> None:
    if said.document is None:
        console.print("its provenance cannot be used: `mlflash verify` says why", style="yellow")
        return
    console.print(f"provenance: {describe(said.document)}", markup=False, soft_wrap=True)
    signed = "" if said.signature == "none" else f"signed by the key {said.document['signer']}"
    given = json.dumps(said.document["given"], ensure_ascii=False) if said.document["given"] else ""
    if line := "; ".join(filter(None, (given, signed))):
        console.print(f"  {line}", markup=False, soft_wrap=True)


def _show_closely(console: Console, those: Sequence[Shard]) -> None:
    first = those[0].entry
    nbytes = sum(part[0].entry.nbytes for part in _boxes(those).values())
    console.print(f"\n{first.name}: {first.kind} {first.dtype} {_shape(first.global_shape)}, {show_bytes(nbytes)}, "
                  f"{_held(those)}", markup=False)  # fmt: skip
    places = new_table(">rank", "offset", "shape", ">size", "node", "file", ">byte")
    for shard in those:
        for nth, run in enumerate(shard.runs):
            begin = [str(shard.rank), _shape(shard.entry.offset), _shape(shard.entry.shape)] if not nth else [""] * 3
            places.add_row(
                *begin,
                show_bytes(run.nbytes),
                shard.node or "-",
                run.file,
                f"{run.start:,}" if run.start >= 0 else "compressed",
            )
        if not shard.runs:
            places.add_row(str(shard.rank), _shape(shard.entry.offset), _shape(shard.entry.shape),
                           show_bytes(shard.entry.nbytes), shard.node, "parts on other nodes", "")  # fmt: skip
    console.print(places)
    numbers = new_table(">rank", ">min", ">max", ">mean", ">std", ">nan", ">inf", ">zeros", "checksum")
    for shard in those:
        if shard.numbers is not None:
            numbers.add_row(str(shard.rank), *_figures(shard.numbers), f"{shard.numbers.check:016x}")
    if len(_boxes(those)) > 1 and not _differ(those) and (whole := _whole_numbers(those)) is not None:
        numbers.add_row("all", *_figures(whole), "")
    console.print(numbers)
    if _differ(those):
        console.print("ranks that hold the same part of this tensor hold different bytes", style="yellow")


def _figures(of: Statistics) -> list[str]:
    known = [of.low, of.high, of.mean if of.count else None, of.std]
    return [*("-" if number is None else f"{number:.4g}" for number in known), f"{of.nan:,}", f"{of.inf:,}",
            f"{of.zeros:,}"]  # fmt: skip


def _shape(numbers: Sequence[int]) -> str:
    return f"[{', '.join(map(str, numbers))}]"
