"""Which ranks hold a DTensor: meshes by name, so that the same name of a tensor on two meshes is two tensors."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import xxhash

_names: dict[int, tuple[int, str]] = {}  # by the id of a mesh that lives: the size of the job, its name


def name_of(mesh: Any) -> str:
    """Name a device mesh by what it leaves out of the ranks of the job.

    A mesh that was cut out of a larger one has the coordinates, there, that all of its ranks share. So
    it can be found again after its other dimensions have changed. Any other is named by its ranks.

    Returns:
        "" for all ranks; "expert=1/4,pp=0/2"; "ranks 0-6:2"; or "ranks #..." with a checksum.
    """
    import torch.distributed as dist

    size = dist.get_world_size() if dist.is_initialized() else 0
    # By its id: meshes are equal that were cut out of different ones, or belong to an earlier job of the process.
    known = _names.get(id(mesh))
    if known is not None and known[0] == size:
        return known[1]
    name = _name_of(mesh, size)
    if known is None:
        weakref.finalize(mesh, _names.pop, id(mesh))
    _names[id(mesh)] = size, name
    return name


def _name_of(mesh: Any, size: int) -> str:
    ranks = np.unique(mesh.mesh.numpy())
    if len(ranks) == (size or len(ranks)):
        return ""
    root = mesh._get_root_mesh()
    names = getattr(root, "mesh_dim_names", None)
    if root is not mesh and names:
        coordinates = np.argwhere(np.isin(root.mesh.numpy(), ranks))
        dims = list(zip(names, coordinates.T, root.mesh.shape, strict=True))
        fixed = {name: f"{name}={column[0]}/{many}" for name, column, many in dims
                 if many > 1 and (column == column[0]).all()}  # fmt: skip
        if fixed and math.prod(many for name, _, many in dims if name not in fixed) == len(ranks):
            return ",".join(fixed[name] for name in sorted(fixed))
    steps = np.unique(np.diff(ranks))
    if len(steps) <= 1:
        step = f":{steps[0]}" if len(steps) and steps[0] > 1 else ""
        return f"ranks {ranks[0]}-{ranks[-1]}{step}" if len(ranks) > 1 else f"rank {ranks[0]}"
    return f"ranks #{xxhash.xxh3_64_hexdigest(ranks.astype('<i8').tobytes())}"


Named = tuple[str, str | None]
"""The name of a tensor, and that of its mesh."""


def on_several(tensors: Iterable[Named]) -> set[str]:
    """The names that ranks have on several meshes."""
    found: dict[str, set[str | None]] = {}
    for name, mesh in tensors:
        found.setdefault(name, set()).add(mesh)
    return {name for name, on in found.items() if len(on) > 1}


def apart(tensors: Iterable[Named]) -> Callable[[str, str | None], str]:
    """Tell tensors of one name on several meshes apart: a function of name and mesh, which adds "@" and the mesh."""
    several = on_several(tensors)
    return lambda name, mesh: f"{name}@{mesh or 'all ranks'}" if name in several and mesh is not None else name
