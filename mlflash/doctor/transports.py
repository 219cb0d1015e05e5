"""Find the faster transport between these nodes: time saves with each, while the main thread waits or works."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shutil
import socket
import statistics
import time
from collections.abc import Iterator, Mapping

import numpy as np

from ..checkpointer.checkpointer import Checkpointer
from ..config import Config, is_enabled
from ..courier.choice import would_be_process
from ..errors import Closed, text_of
from ..mpi.fabric import AUTO, between_nodes, choose_transport
from ..mpi.world import World
from ..saving.snapshot import Snapshot
from ..wireup.launcher_variables import as_torchrun
from ..wireup.process_mapping import name_of_host
from ..wireup.zygote_imports import vendor
from .findings import Finding, fine, warning

_CHECK = "transport"
_TRANSPORTS = ("p2p", "rma")
_AT_MOST_S = 2.0  # no new save begins after so many seconds, for each transport and main thread
_SAVES = 7  # the first one does not count
_MOST_NBYTES, _LEAST_NBYTES = 16 << 20, 1 << 20
_SHARE = 8  # all slots of a node's ranks take one part in so many of the free space
_SLOTS = 4  # slots of a rank: its own, and copies of its partner's
_CLEARLY = 1.25  # so many times as fast; smaller differences do not count, because equal saves differ that much
_ARRAY = 4096  # numbers; a call of numpy takes some microseconds then, like calls in a training loop


@dataclasses.dataclass(frozen=True)
class Measured:
    """Median seconds from `save` to the commit on all ranks.

    Attributes:
        waits_s: the time if the main thread of each rank waits.
        works_s: the time if it calls numpy on small arrays, one call after the other.
    """

    waits_s: float
    works_s: float


def between(world: World, given: Config) -> Iterator[Finding]:
    """Save with each transport and compare the times. Collective over the world; for all ranks.

    It takes at most about ten seconds. It makes its own directory in memory and deletes it.

    Args:
        world: all ranks.
        given: settings: memory, transport, emulated nodes.
    """
    if len(world.topology.node_names) == 1:
        return
    if not is_enabled(os.environ):
        yield fine(_CHECK, "not measured, because mlflash is off")
        return
    nbytes = world.agree([_room(given.memory, world.local_size)])[0]
    if nbytes < _LEAST_NBYTES:
        yield fine(_CHECK, f"not measured: {given.memory} has too little free space")
        return
    path = os.path.join(given.memory, "mlflash-doctor-" + world.broadcast(secrets.token_hex(4), 0))
    try:
        world.on_all(lambda: os.makedirs(path, 0o700, exist_ok=True))
        times = {transport: measure(world, path, transport, nbytes, given) for transport in _TRANSPORTS}
        world.agree([0])  # afterwards no rank has it open
    finally:
        shutil.rmtree(path, ignore_errors=True)
    yield judge(times, choose_transport(world, given.transport), given.transport, between_nodes(world), nbytes)


def measure(world: World, memory: str, transport: str, nbytes: int, given: Config) -> Measured:
    """Time saves of ``nbytes`` bytes on each rank. Collective over the world.

    Args:
        memory: a directory in memory that only this measurement uses.
    """
    state = {"bytes": np.zeros(nbytes, np.uint8)}
    taken: list[float] = []
    is_process = would_be_process(given.courier, vendor())
    with _meeting_anew(world) if is_process else contextlib.nullcontext(), Checkpointer(
        job=f"doctor-{transport}", memory=memory, comm=None if is_process else world.world, transport=transport,
        redundancy="copy", strict=True, timeout_s=world.timeout_s, ranks_per_node=given.ranks_per_node, reserve=0,
        when_busy="wait", drain_every=0, fresh=False, log="", metrics="", send_rate=0.0,
        scrub_rate=0.0, courier="process" if is_process else "thread",
    ) as ckpt:  # fmt: skip
        ckpt.prepare(state)
        for works in (False, True):
            seconds: list[float] = []
            end = time.monotonic() + _AT_MOST_S
            while len(seconds) < _SAVES and world.agree([int(time.monotonic() < end)])[0]:
                state["bytes"][:: 1 << 12] += 1
                snapshot = ckpt.save((ckpt.last_step or 0) + 1, state)
                if works:
                    _work_beside(snapshot)
                snapshot.wait()
                assert snapshot.commit_s is not None
                seconds.append(max(world.gather(snapshot.commit_s)))
            taken.append(statistics.median(seconds[1:] or seconds))
    return Measured(*taken)


@contextlib.contextmanager
def _meeting_anew(world: World) -> Iterator[None]:
    """Let ranks start couriers that are processes. They meet as under torchrun, because MPI already uses the launcher.

    Collective over the world.

    Raises:
        Closed: the couriers could not be started.
    """
    with socket.socket() as sock:
        sock.bind(("", 0))
        port = sock.getsockname()[1]
    alone = len(set(world.gather_nodes(name_of_host()))) == 1
    address, number = world.broadcast(("127.0.0.1" if alone else socket.gethostname(), port), 0)
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(as_torchrun(before, world.rank, world.size, world.local_rank, address, number))
    try:
        yield
    except OSError as error:  # of the zygote, or of a courier that has ended
        raise Closed(f"courier processes cannot be started here: {text_of(error)}") from error
    finally:
        os.environ.clear()
        os.environ.update(before)


def judge(times: Mapping[str, Measured], taken: str, asked: str, lies_between: str, nbytes: int) -> Finding:
    """Say which transport is faster, and whether a job would take it.

    Args:
        times: the times of each transport.
        taken: the transport that a job would take.
        asked: the setting: a transport, or "auto".
        lies_between: what connects the nodes: a key of `mlflash.mpi.fabric.AUTO`.
        nbytes: size of a save.
    """
    other = next(transport for transport in times if transport != taken)
    by = f"auto takes {taken} ({lies_between})" if asked == "auto" else f"MLFLASH_TRANSPORT says {taken}"
    text = (f"saves of {{save_nbytes}}: {taken} {{taken_waits_s}}, with a busy main thread {{taken_works_s}}; "
            f"{other} {{other_waits_s}}, {{other_works_s}}; {by}")  # fmt: skip
    values = {"save_nbytes": nbytes, "taken_waits_s": times[taken].waits_s, "taken_works_s": times[taken].works_s,
              "other_waits_s": times[other].waits_s, "other_works_s": times[other].works_s}  # fmt: skip
    faster = (times[taken].waits_s * times[taken].works_s / (times[other].waits_s * times[other].works_s)) ** 0.5
    if faster < _CLEARLY:
        return fine(_CHECK, text, **values)
    remedy = "unset MLFLASH_TRANSPORT" if AUTO[lies_between] == other else f"set MLFLASH_TRANSPORT={other}"
    return warning(_CHECK, text, f"{remedy}: {other} was {faster:.1f} times as fast here", **values)


def _work_beside(snapshot: Snapshot) -> None:
    """Make many short calls, like a training loop, until a save has ended. Not collective."""
    numbers = np.ones(_ARRAY, np.float32)
    while not snapshot.done:
        np.multiply(numbers, 1.0, out=numbers)


def _room(memory: str, local_size: int) -> int:
    """Return the number of bytes that a rank may save; 0 without a memory file system."""
    try:
        stat = os.statvfs(memory)
    except OSError:
        return 0
    part = stat.f_bavail * stat.f_frsize // _SHARE // (_SLOTS * local_size)
    return min(_MOST_NBYTES, part // _LEAST_NBYTES * _LEAST_NBYTES)
