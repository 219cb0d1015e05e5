"""Which part of the big matrices a run takes: a share. Each run ends soon, and some runs cover all of them.

Of the cases of each test that `MATRICES` names, a run takes every so manieth. Which ones follows from
MLFLASH_TEST_SHARE, a number below `SHARES`; where it is not set, or "all", all run. In CI it follows from the tree that
is tested (steps.py).
CONTRIBUTING.md has the table of what is divided, and how many runs cover all of it.
"""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

SHARES = 12  # each number of parts divides it


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Tests with many cases.

    Attributes:
        tests: how their names begin.
        what: the cases, for people.
        parts: a run takes one of so many.
        open_mpi: the same under Open MPI, where everything was run under MPICH, too, and a launch takes three times as
            long.
        by: cases with the same value of this parameter go together; None: each is one.
        by_text: so do those with the same text of this parameter, where they have it, in whichever test they are.
        singles: tests with a single case are divided, too.
    """

    tests: str
    what: str
    parts: int
    open_mpi: int = 0
    by: str | None = None
    by_text: str | None = None
    singles: bool = False


# The first that fits a test divides it.
MATRICES = (
    Matrix("tests/mpi/test_lazy.py", "optimizers and moments of lazy saves, on each number of ranks", 4, 12),
    Matrix("tests/mpi/", "transports, on each number of ranks", 3, 4),
    Matrix("tests/adapters/", "cases of the adapters to PyTorch and Megatron", 1, 3),
    Matrix("tests/faults/test_crash_points.py", "crash points: the pairwise sample", 12),
    Matrix("tests/faults/test_courier_points.py", "crash points where couriers are processes", 12),
    Matrix("tests/faults/test_drain.py", "crash points and file systems that fail, while it drains", 6,
           singles=True),
    Matrix("tests/faults/test_node_loss.py", "nodes, ranks and transports of lost nodes", 6, 6, singles=True),
    Matrix("tests/faults/test_lazy.py", "crash points of lazy saves", 6),
    Matrix("tests/faults/test_mend.py", "who dies, and where, while damage is mended", 4),
    Matrix("tests/faults/test_dcp.py", "crash points of asynchronous DCP saves", 6),
    Matrix("tests/faults/test_damage.py", "places of a slot that are damaged", 3),
    Matrix("tests/faults/test_other_ranks.py", "crash points of a restart on other ranks", 3),
    Matrix("tests/faults/test_scavenge.py", "schemes and numbers of nodes that are scavenged", 4, singles=True),
    Matrix("tests/faults/test_jobs.py", "jobs that are late or fail, with each transport", 6, 6, singles=True),
    Matrix("tests/faults/test_pressure.py", "transports and moments of full memory", 3, singles=True),
    Matrix("tests/faults/test_doctor.py", "what `mlflash doctor` finds where ranks hang", 4, singles=True),
    Matrix("tests/programs/test_deaths.py", "launchers, and who dies how beside couriers that are processes", 6),
    Matrix("tests/programs/test_pytorch_page.py", "loops of plain PyTorch, and their data", 2),
    Matrix("tests/programs/test_sharded.py", "shards of an optimizer without state", 2, singles=True),
    Matrix("tests/programs/test_smp_recipe.py", "where the replicas of SageMaker's SMP are; TP, EP", 2, singles=True),
    Matrix("tests/programs/test_trainers_without_mpi.py", "trainers of PyTorch's that never load MPI", 2, singles=True),
    Matrix("tests/programs/test_pytorch_harness.py", "numbers of ranks that PyTorch's harness spawns", 3, singles=True),
    Matrix("tests/programs/test_left_steps.py", "kinds of models that leave a step", 3, singles=True),
    Matrix("tests/programs/test_launchers.py", "what sets RANK and WORLD_SIZE", 2, singles=True),
    Matrix("tests/programs/test_distributed.py", "launchers and orders of groups", 2),
    Matrix("tests/programs/test_megatron_install.py", "flags and versions of Megatron", 2),
    Matrix("tests/programs/test_any_state.py", "states made by chance, in programs of their own", 2, singles=True),
    Matrix("tests/cluster/slurm/test_run.py", "what a job of a real Slurm may meet", 2, singles=True),
    Matrix("tests/cluster/slurm/test_keep_alive.py", "how nodes of a real Slurm are lost that others outlive", 2),
    Matrix("tests/cluster/test_launchers.py", "workers that torchrun starts on several nodes, and their networks", 2,
           singles=True),
    Matrix("tests/cluster/test_run.py", "what `mlflash run` on hosts may meet", 2, singles=True),
    Matrix("tests/cluster/test_keep_alive.py", "how ranks are lost that others outlive, and when others follow", 4),
    Matrix("tests/programs/test_demo.py", "how `mlflash demo --keep-alive` ends", 4, singles=True),
    Matrix("tests/cluster/test_cables.py", "transports over cables that are cut", 4, 4),
    Matrix("tests/cluster/test_node_loss.py", "transports between nodes that are really apart", 4, 4),
    Matrix("tests/cluster/test_parity.py", "schemes between nodes that are really apart", 4, 4),
    Matrix("tests/cluster/test_points.py", "crash points of nodes that are really apart", 4, 12),
    Matrix("tests/frameworks/test_contract.py",
           "variants of each framework, and which frameworks are asked when they save", 2, by="trained",
           by_text="own_saves"),
    Matrix("tests/frameworks/test_docs.py", "scripts of the pages on frameworks", 2, by="page"),
    Matrix("tests/frameworks/test_loading.py", "frameworks where an object cannot be loaded on one rank", 2),
    Matrix("tests/packaging/test_extras.py", "extras, each in an environment of its own", 6, singles=True),
)  # fmt: skip


def taken(said: str | None = None) -> int | None:
    """The share that this run takes; None: all of them.

    Args:
        said: a number or "all"; default: MLFLASH_TEST_SHARE.

    Raises:
        ValueError: it is neither.
    """
    said = said or os.environ.get("MLFLASH_TEST_SHARE") or "all"
    if said == "all":
        return None
    if not said.isdigit() or int(said) >= SHARES:
        raise ValueError(f"the share {said!r} does not exist: expected a number below {SHARES}, or all")
    return int(said)


def of_tree(tree: str) -> int:
    """The share that follows from a tree, by its hash in Git: others of the same tree take the same."""
    return int(tree, 16) % SHARES


def has(share: int, matrix: str, parts: int, case: int) -> bool:
    """Whether a share has a case of a matrix.

    What is divided by the same number is not divided alike: each matrix begins elsewhere, by its name.

    Example:
        Of 4 parts, shares 0, 4 and 8 have every fourth case, from the third on where the name says 2.
    """
    return (case + zlib.crc32(matrix.encode())) % parts == share % parts


def divide(items: Sequence[pytest.Item], share: int, is_open_mpi: bool) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Divide collected tests into those that a share has and those that it does not have.

    Not collective, and the same on all ranks and on any number of them: it follows from names and order.
    """
    divided: tuple[list[pytest.Item], list[pytest.Item]] = ([], [])
    seen: Counter[str] = Counter()
    for item in items:
        name = item.nodeid.partition("[")[0]
        divided[not _takes(share, item, name, seen[name], is_open_mpi)].append(item)
        seen[name] += 1
    return divided


def _takes(share: int, item: pytest.Item, name: str, number: int, is_open_mpi: bool) -> bool:
    matrix = next((one for one in MATRICES if name.startswith(one.tests)), None)
    if matrix is None:
        return True
    parts = matrix.open_mpi or matrix.parts if is_open_mpi else matrix.parts
    if matrix.by is not None:
        cases = getattr(item, "callspec", None)
        if cases is not None and (text := cases.params.get(matrix.by_text)) is not None:
            return has(share, matrix.tests, parts, zlib.crc32(text.encode()))
        if cases is None or matrix.by not in cases.indices:
            return True
        return has(share, matrix.tests, parts, cases.indices[matrix.by])
    if not hasattr(item, "callspec") and not matrix.singles and not is_open_mpi:
        return True
    return has(share, name, parts, number)
