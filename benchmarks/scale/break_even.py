"""Computes from the model under which conditions mlflash would be slower than a parallel file system.

Both sides relaunch alike, or recover as in `recoveries.WAYS`. At each condition both take the same time.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

from scale import model, recoveries
from scale.forecast import FEW
from scale.model import Machine
from scale.parameters import LIBFABRIC, PERLMUTTER, SLINGSHOT_11, TECTONIC, UCX, Fabric, FileSystem, Node, WireUp

from mlflash.placement.redundancy_scheme import Scheme, parse

COPY = parse("copy")
_STEPS = 200  # steps of a bisection over the whole range of a float


@dataclasses.dataclass(frozen=True)
class Condition:
    """A number at which mlflash and the file system take equally long.

    Attributes:
        what: the number, and the side on which mlflash is slower.
        unit: unit of the number.
        assumed: value in the model, or None if the model has none.
        at: values by number of GPUs, with key 0 for all sizes. With None mlflash is faster at any value of the number,
            with inf it is slower at any value.
    """

    what: str
    unit: str
    assumed: float | None
    at: dict[int, float | None]


def crossing(ours: Callable[[float], float], theirs: Callable[[float], float], low: float, high: float,
             grows: bool) -> float | None:  # fmt: skip
    """Find the number at which two sides take equally long, between two positive ones.

    Args:
        ours, theirs: give the seconds of each side.
        low, high: range of the number.
        grows: whether mlflash is slower above the number. Else it is slower below it.

    Returns:
        The number. None if mlflash is faster from ``low`` to ``high``, and inf if it is slower.
    """
    slower_at = [ours(end) > theirs(end) for end in (low, high)]
    if slower_at[0] == slower_at[1]:
        return math.inf if slower_at[0] else None
    if slower_at != [not grows, grows]:
        raise ValueError(f"mlflash is slower at the {'lower' if grows else 'upper'} end")
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        if (ours(middle) > theirs(middle)) == grows:
            high = middle
        else:
            low = middle
    return math.sqrt(low * high)


def read_Bps_of_a_gpu(machine: Machine, scheme: Scheme = COPY) -> float | None:
    """Find the bytes per second for each GPU at which a file system restores as fast as mlflash."""
    ours = model.restored_s(machine, scheme)

    def theirs(rate: float) -> float:
        pfs = FileSystem("", rate * machine.gpus, rate * machine.gpus, rate * machine.node.gpus)
        return model.pfs_restored_s(machine, pfs)

    return crossing(lambda rate: ours, theirs, 1.0, 1e15, grows=True)


def nbytes_of_a_gpu(machine: Machine, pfs: FileSystem, scheme: Scheme = COPY) -> float | None:
    """Find the bytes of state on each GPU below which a file system restores faster."""

    def of(nbytes: float) -> Machine:
        return dataclasses.replace(machine, nbytes=nbytes)

    return crossing(lambda nbytes: model.restored_s(of(nbytes), scheme),
                    lambda nbytes: model.pfs_restored_s(of(nbytes), pfs), 1.0, 1e15, grows=False)  # fmt: skip


def loaded(machine: Machine, pfs: FileSystem, commits: bool, scheme: Scheme = COPY) -> float | None:
    """Find the share of the fabric below which a file system commits, or restores, faster."""
    ours, theirs = (model.committed_s, model.pfs_committed_s) if commits else (model.restored_s, model.pfs_restored_s)

    def of(share: float) -> Machine:
        return dataclasses.replace(machine, fabric=dataclasses.replace(machine.fabric, loaded=share))

    other = theirs(machine, pfs)
    return crossing(lambda share: ours(of(share), scheme), lambda share: other, 1e-9, 1.0, grows=False)


def gpus_of_the_file_system(machine: Machine, pfs: FileSystem, scheme: Scheme = COPY) -> float | None:
    """Find the number of GPUs above which a file system restores faster."""

    def of(gpus: float) -> Machine:
        return dataclasses.replace(machine, gpus=int(gpus))

    return crossing(lambda gpus: model.restored_s(of(gpus), scheme), lambda gpus: model.pfs_restored_s(of(gpus), pfs),
                    1000, 1e8, grows=True)  # fmt: skip


def gpus_where_ranks_count(
    machine: Machine, growing: Sequence[Callable[[Machine], float]], scheme: Scheme = COPY
) -> float | None:
    """Find the number of GPUs above which the growing parts of a restore take longer than its bytes.

    Args:
        machine: a machine of any size.
        growing: give the seconds of the growing parts.
        scheme: redundancy.
    """

    def grown(gpus: float) -> float:
        bigger = dataclasses.replace(machine, gpus=int(gpus))
        return sum(seconds(bigger) for seconds in growing)

    return crossing(grown, lambda gpus: model.moved_s(machine, scheme), 2, 1e8, grows=True)


def relaunch_s(machine: Machine, pfs: FileSystem) -> float | None:
    """Find the seconds of a relaunch below which, with a file system, it beats a recovery in place."""
    ours = recoveries.in_place_s(machine, node_lost=True)
    restored = model.pfs_restored_s(machine, pfs)
    return crossing(lambda seconds: ours, lambda seconds: seconds + restored, 1e-6, 1e6, grows=False)


def conditions(node: Node, fabric: Fabric = SLINGSHOT_11, gpus: tuple[int, ...] = FEW) -> Iterator[Condition]:
    """Compute all conditions."""

    def each(work: Callable[[Machine], float | None], how: WireUp = LIBFABRIC) -> dict[int, float | None]:
        return {number: work(Machine(number, node, fabric, wire_up=how)) for number in gpus}

    def once(work: Callable[[Machine], float | None], how: WireUp = LIBFABRIC) -> dict[int, float | None]:
        return {0: work(Machine(gpus[0], node, fabric, wire_up=how))}

    yield Condition(
        "restore: rate of the file system for each GPU above", "GB/s", None, _over(each(read_Bps_of_a_gpu), 1e9)
    )
    for pfs in (PERLMUTTER, TECTONIC):
        yield Condition(f"restore, {pfs.name}: state of a GPU below", "GB", model.STATE_NBYTES / 1e9,
                        _over(each(functools.partial(nbytes_of_a_gpu, pfs=pfs)), 1e9))  # fmt: skip
    for commits, what in ((True, "commit"), (False, "restore")):
        yield Condition(f"{what}, {PERLMUTTER.name}: share of the fabric below", "", fabric.loaded,
                        each(functools.partial(loaded, pfs=PERLMUTTER, commits=commits)))  # fmt: skip
    for how in (LIBFABRIC, UCX):
        for pfs in (PERLMUTTER, TECTONIC):
            yield Condition(f"restore, {pfs.name}, addresses of {how.name}: number of GPUs above", "GPUs", None,
                            once(functools.partial(gpus_of_the_file_system, pfs=pfs), how))  # fmt: skip
        both = functools.partial(gpus_where_ranks_count, growing=(model.wire_up_s, model.agreed_s))
        yield Condition(
            f"wire-up and agreement take longer than the bytes, {how.name}: above", "GPUs", None, once(both, how)
        )
    agreement = functools.partial(gpus_where_ranks_count, growing=(model.agreed_s,))
    yield Condition("tables and agreement alone take longer than the bytes: above", "GPUs", None, once(agreement))
    yield Condition(f"recovery in place, {PERLMUTTER.name}: relaunch below", "s", model.RELAUNCH_S,
                    each(functools.partial(relaunch_s, pfs=PERLMUTTER)))  # fmt: skip


def _over(found: dict[int, float | None], unit: float) -> dict[int, float | None]:
    return {gpus: None if value is None else value / unit for gpus, value in found.items()}
