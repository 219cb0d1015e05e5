"""What a rank writes, and what commits a checkpoint → a directory that plain `torch.distributed.checkpoint.load` reads.

DCP's files have no room for a card: each rank has one beside, written before its data, so that whose that is can be
told even when a drain is interrupted. `.metadata` says where DCP finds what; mlflash itself restores by its own index,
since DCP keeps one tensor of a name only, and pickles what is no tensor.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import pickle
import zlib
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from ..state.leaves import Entry, apart, from_bytes
from ..state.plain_values import decode_plain
from ..storage import dcp_plans
from ..storage.dcp_files import METADATA, Contents, Keys, Path, keys_of, metadata, pickled, rank_file
from ..storage.file_holes import FileWithHoles
from ..storage.whole_state import build
from ..text import listed
from . import checkpoint_directory
from .index import RankFiles
from .rank_content import DrainInput, RankContent, Receipt, plain_file

log = logging.getLogger("mlflash")

MASTER = "checkpoint.mlflash"


class Dcp:
    """PyTorch's distributed checkpoint."""

    name = "dcp"
    most_pieces: float = math.inf

    def rank_files(self, drain_input: DrainInput, rank: int, content: RankContent, owner: str
                   ) -> tuple[list[tuple[str, FileWithHoles]], Receipt]:  # fmt: skip
        key_of, extras, paths = _keys(rank, content)
        known = [number for number, part in enumerate(content.parts) if part.entry.name in key_of]
        pieces = [_renamed(content.parts[number].entry, key_of) for number in known]
        skeleton, places, begin = rank_file(pieces, [content.sources[number] for number in known], extras)
        starts = dict(zip(known, begin, strict=True))
        for number, part in enumerate(content.parts):
            if number not in starts:  # arrays, and tensors in tuples: only mlflash reads them
                starts[number] = skeleton.nbytes
                skeleton.place(starts[number], part.entry.nbytes, content.sources[number])
        name, card_name = f"__{rank}_0.distcp", f"rank-{rank:05d}.mlflash"
        where = content.places(name, [starts[number] for number in range(len(content.parts))])
        text, first_nbytes = content.index(where)
        card_file, card = plain_file(drain_input, rank, owner, text)
        rank_files = RankFiles.of(card_name, card, name, skeleton.nbytes, text[:first_nbytes])
        ties = {key_of[a]: key_of[b] for a, b in content.ties.items() if a in key_of and b in key_of}
        meshes = {key_of[entry.name]: entry.mesh for entry in content.home.manifest.entries if entry.name in key_of}
        more = pickle.dumps((Contents(name, pieces, list(extras), places), paths, ties, meshes))
        receipt = Receipt(rank, rank_files, [], content.ties, None, more=zlib.compress(more, 1))
        return [(card_name, card_file), (name, skeleton)], receipt

    def master_files(
        self, drain_input: DrainInput, text: bytes, receipts: Sequence[Receipt], job: str, owner: str
    ) -> list[tuple[str, FileWithHoles]]:
        # Safe: these come from ranks of this job.
        described = [pickle.loads(zlib.decompress(receipt.more)) for receipt in receipts]
        key_of = apart(pair for *_, meshes in described for pair in meshes.items())
        files: list[Contents] = []
        paths: dict[str, Path | None] = {}
        ties: dict[str, str] = {}
        for contents, rank_paths, rank_ties, meshes in described:
            keys = {key: key_of(key, mesh) for key, mesh in meshes.items()}
            files.append(dataclasses.replace(contents, pieces=[_renamed(piece, keys) for piece in contents.pieces]))
            for key, path in rank_paths.items():
                name = keys.get(key, key)
                if path and name != key:
                    path = (*path[:-1], f"{path[-1]}{name.removeprefix(key)}")
                if paths.get(name) is None:
                    paths[name] = path
            ties = {keys[a]: keys[b] for a, b in rank_ties.items()} | ties
        listing, left_out = FileWithHoles(), dict[str, str]()
        where = {key: path or (key,) for key, path in paths.items()}
        tag = checkpoint_directory.tag(drain_input.attempt, owner)
        listing.patch(0, metadata(files, where, ties, tag, left_out))
        if left_out:
            log.info("of what has one name on several ranks, torch.distributed.checkpoint reads that of the first rank "
                     "only, and mlflash that of each: %s", listed(sorted(left_out)))  # fmt: skip
        commit, _ = plain_file(drain_input, -1, owner, text)
        return [(METADATA, listing), (MASTER, commit)]


def _keys(rank: int, content: RankContent) -> tuple[dict[str, str], dict[str, bytes], Mapping[str, Path | None]]:
    """DCP's keys of the tensors, by name; its pickled objects, by key; and where each key is in the nested state."""
    home = content.home
    entries, tree = home.manifest.entries, home.manifest.tree
    if dcp_plans.is_planned(tree):
        index, blob = (home.reader()(entries[number]).tobytes() for number in range(2))
        plan = dcp_plans.Index.decode(index)
        objects = {key: blob[start:end] for key, (start, end) in plan.parts.items()}
        return dcp_plans.names_of(tree, entries), objects, dict.fromkeys(plan.names()) | plan.paths()
    keys = keys_of(tree, entries, root="state")
    names = {entries[number].name: key for key, number in keys.tensors.items()}
    return names, _extras(rank, content, keys), keys.paths


def _renamed(entry: Entry, key_of: Mapping[str, str]) -> Entry:
    return msgspec.structs.replace(entry, name=key_of[entry.name])


def _extras(rank: int, content: RankContent, keys: Keys) -> dict[str, bytes]:
    """What DCP pickles: the objects of each rank, except those that rank 0 writes anyway."""
    manifest, read = content.home.manifest, content.home.reader()
    entries, plain = manifest.entries, manifest.plain
    extras = {}
    for key, tree in keys.objects.items():
        inside: list[int] = []
        build(tree, inside.append, lambda _: None)
        if rank and inside and all(content.commons[number] == 0 for number in inside):
            continue
        value = build(tree, lambda number: from_bytes(entries[number], np.array(read(entries[number]))),
                      lambda number: decode_plain(plain[number]))  # fmt: skip
        extras[key] = pickled(value, any(entries[number].kind == "tensor" for number in inside))
    return extras
