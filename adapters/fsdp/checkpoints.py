"""Save and load by checkpoint id and process group."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import itertools
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict, _stateful_to_state_dict
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.distributed.tensor import DTensor

from mlflash import config
from mlflash.checkpointer.off import turned_off
from mlflash.errors import ConfigError, MlflashError, SaveFailed, StateError, StepNotFound, StructureMismatch, text_of
from mlflash.state.leaves import live_bytes

from .. import ids
from .groups import Everyone, Group, Member
from .states import DEGREE, LocalState

try:
    from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader, FsspecWriter
except ImportError:  # before PyTorch 2.15
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

log = logging.getLogger("mlflash")

_MANY = 8  # names of one group above which mlflash warns that they may be steps


@dataclasses.dataclass(frozen=True)
class DistributedFileSystemReader:
    """Holds an id to load from, as in SMP. `Checkpoints.load` takes this or the id itself.

    Attributes:
        checkpoint_id: the id that you gave to `Checkpoints.async_save`. Without a step, the newest is loaded.
    """

    checkpoint_id: str | os.PathLike[str]


class Checkpoints:
    """Saves and loads state dicts in the memory of the nodes, or at URLs.

    An id without its step is a name (see `ids`). Each name has its own checkpoints, with two slots on each of its
    ranks. Several groups of ranks may save at the same time under different names, and each group commits by itself. If
    you save an id again, or save an id without a step, the commit of the new content replaces the old.

    Needs torch.distributed with the ranks of the launcher. If `mlflash.adapters.distributed.init_process_group` set it
    up, the groups may make their first call in any order.

    Args:
        directory, settings: as those of a Checkpointer. Each name is drained to a folder of its own in ``directory``.
        enabled: False, or ``MLFLASH_DISABLE=1``: nothing is saved or found in memory. URLs still work.

    Attributes:
        enabled: whether checkpoints are saved in memory.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, enabled: bool = True, **settings: Any):
        self.enabled = not turned_off(enabled)
        given = config.from_environment(os.environ, directory, job=settings.pop("job", None), enabled=enabled)
        self._job, self._everyone = given.job, Everyone(settings.get("timeout_s") or given.timeout_s)
        self._settings, self._directory = settings, given.directory
        self._groups: dict[tuple[int, ...], Group] = {}
        self._members: dict[tuple[str, tuple[int, ...]], Member] = {}
        self._calls: list[tuple[Group, concurrent.futures.Future[Metadata]]] = []
        self._saved: set[tuple[str, tuple[int, ...]]] = set()  # names, and the ranks that have saved them
        self._loaded: dict[str, int] = {}  # the loaded step of each name, until the name is saved again
        self._undefined: dict[str, str] = {}  # for each name: why a load has left its state undefined
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "mlflash-fsdp")

    def async_save(
        self, state_dict: Mapping[str, Any], checkpoint_id: str | os.PathLike[str], process_group: Any = None,
        coordinator_rank: int | None = None, *, until: Sequence[Any] = (),
    ) -> concurrent.futures.Future[Metadata]:  # fmt: skip
        """Stage a state dict and save it in the background.

        Collective over the process group. You may change ``state_dict`` when this returns.

        Args:
            state_dict: nested dicts of tensors and values; local, sharded or full.
            checkpoint_id: a path, see `ids`; or a URL that fsspec knows.
            process_group: the ranks that save it. None: the default group.
            coordinator_rank: the rank of the world that plans. None: the lowest of the group.
            until: torch optimizers. Their tensors are copied while training goes on, see `MemoryWriter`.

        Returns:
            A future that ends with the commit and gives the checkpoint's Metadata. The Metadata is empty if mlflash is
            off and the id is not a URL. `maybe_finalize_async_calls` also raises the error of a failed save.

        Raises:
            WorldMismatch: the coordinator is not in the group.
            StateError: a leaf cannot be saved (the error has its path); the ranks of the group hold different shards of
                a local state; or the group does not hold all shards of a DTensor.
        """
        if not self._serves(checkpoint_id):
            nothing: concurrent.futures.Future[Metadata] = concurrent.futures.Future()
            nothing.set_result(Metadata({}))
            return nothing
        group = self._group(process_group)
        coordinator = group.coordinator(coordinator_rank)
        refuse_other_shards(state_dict, group.ranks)
        state_dict = _stateful_to_state_dict(dict(state_dict))
        name, step = ("", None) if _is_url(checkpoint_id) else ids.read(checkpoint_id)
        if is_first := (name, group.ranks) not in self._saved:
            refuse_missing_shards(state_dict, group.ranks)
        if _is_url(checkpoint_id):
            to_url = FsspecWriter(os.fspath(checkpoint_id), overwrite=True)
            staged = DefaultStager(StagingOptions(False, False, False, False)).stage(state_dict)
            done = self._thread.submit(_save, staged, to_url, None, group, coordinator, is_first)
        else:
            member, step = self._member(name, group), self._next(name, step)
            member.writer.until = () if is_first else until  # `warn_of_unlike` reads the first one
            staged = member.writer.stage(state_dict)
            done = self._thread.submit(_save_in_memory, staged, member, step, group, coordinator, is_first)
        self._saved.add((name, group.ranks))
        self._calls.append((group, done))
        return done

    def maybe_finalize_async_calls(self, blocking: bool = True, process_group: Any = None) -> None:
        """Forget the saves that have ended, and raise the error of a failed one.

        Collective over the process group.

        Args:
            blocking: True: wait for all saves. False: handle only saves that have ended on all ranks of the group.
            process_group: the ranks that made the saves. None: the default group.

        Raises:
            SaveFailed: a save failed. The checkpoint before it is untouched.
        """
        if not self.enabled and _ranks_of(process_group) not in self._groups:
            return  # nothing was ever saved to a URL
        group = self._group(process_group)
        saves = [done for owner, done in self._calls if owner is group]
        if not blocking and saves:
            ended = torch.tensor([int(done.done()) for done in saves])
            dist.all_reduce(ended, dist.ReduceOp.MIN, group=group.status)
            saves = [done for done, all_ended in zip(saves, ended.tolist(), strict=True) if all_ended]
        self._calls = [call for call in self._calls if not any(call[1] is done for done in saves)]
        errors = [error for done in saves if (error := done.exception()) is not None]
        if errors:
            raise SaveFailed(f"a checkpoint was not saved: {errors[0]}") from errors[0]

    def load(
        self, state_dict: dict[str, Any], checkpoint_id: str | os.PathLike[str] | None = None,
        process_group: Any = None, coordinator_rank: int | None = None, then: Callable[[], Any] | None = None, *,
        storage_reader: DistributedFileSystemReader | None = None,
    ) -> int | None:  # fmt: skip
        """Fill a state dict in place.

        Collective over all ranks of torch.distributed, each with its own process group. Groups that load the same id
        load the same step, no matter which of them saved it. A local state dict can be loaded on the same number of
        shards with any number of replicas, and a sharded one on any number of ranks.

        Args:
            state_dict: a state dict like the one that you gave to `async_save`.
            checkpoint_id: without a step, the newest that is not damaged beyond repair.
            process_group: the ranks that load it. None: the default group.
            coordinator_rank: as in `async_save`.
            then: called after a load, such as ``lambda: load_local_state_dict(model, optimizer, state_dict)``. If it
                raises on any rank, all ranks of the group raise. Then saves under this name fail until a load succeeds.
            storage_reader: has the id, if you give no id.

        Returns:
            The step; 0 for a URL. None, with a warning, if nothing was saved under this name: ``state_dict`` is
            unchanged.

        Raises:
            ConfigError: you gave neither an id nor a reader, or both.
            DeadlineExceeded: not all ranks made this call in time.
            StructureMismatch: the state dict is sharded over another number of ranks or differs from the saved one, or
                its optimizer has no state and the saved one had state.
            StepNotFound: there is no such step.
            Unrestorable: there are checkpoints of this name, but none can be loaded.
        """
        checkpoint_id = _only_one(checkpoint_id, storage_reader)
        if not self._serves(checkpoint_id):
            return None
        group = self._group(process_group)
        group.coordinator(coordinator_rank)
        if _is_url(checkpoint_id):
            self._load_url(state_dict, os.fspath(checkpoint_id), group, then)
            return 0
        name, step = ids.read(checkpoint_id)
        with self._that_loads(name, group) as (member, every):
            step = self._step(name, step, member, every)
            if step is None:
                if every.ranks[0] == dist.get_rank():
                    log.warning("nothing was saved under the id %s: the state dict is unchanged", checkpoint_id)
                return None
            member.reader.reset(f"step-{step}")
            _load(state_dict, member.reader, every.status)
            if then is not None:
                member.checkpointer.adapting.load_together(step, then)
            self._loaded[name] = step
            return step

    def load_sharded_optimizer_state_dict(
        self, model_state_dict: Any, optimizer_key: str, storage_reader: DistributedFileSystemReader,
        process_group: Any = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Load the optimizer's part of a sharded checkpoint, for ``FSDP.optim_state_dict_to_load``.

        Collective over all ranks of torch.distributed, each with its own process group, like `load`. You do not need
        this call if you use `load_sharded_state_dict`, which also works for FSDP2.

        Args:
            model_state_dict: ignored; SMP's call has this argument.
            optimizer_key: key of the optimizer in the saved state dict.
            storage_reader: has the id.
            process_group: the ranks that share each tensor. None: the default group.

        Returns:
            ``{optimizer_key: ...}``, with ShardedTensors.

        Raises:
            StepNotFound: nothing was saved under this id, or mlflash is off and the id is not a URL.
        """
        checkpoint_id = storage_reader.checkpoint_id
        if not self._serves(checkpoint_id):
            raise StepNotFound("mlflash is off, so only a URL can be loaded", found=os.fspath(checkpoint_id))
        group = self._group(process_group)
        if _is_url(checkpoint_id):
            return _load_optimizer(FsspecReader(os.fspath(checkpoint_id)), None, optimizer_key, group, group.status)
        name, step = ids.read(checkpoint_id)
        with self._that_loads(name, group) as (member, every):
            step = self._step(name, step, member, every)
            if step is None:
                raise StepNotFound("nothing was saved under this id", found=os.fspath(checkpoint_id))
            return _load_optimizer(member.reader, f"step-{step}", optimizer_key, group, every.status)

    def _load_url(self, state_dict: dict[str, Any], url: str, group: Group, then: Callable[[], Any] | None) -> None:
        _load(state_dict, FsspecReader(url), group.status)
        if then is not None:
            _agreed(then, group.status)
        for member in self._members.values():
            member.checkpointer.adapting.loaded_elsewhere()
        self._undefined.clear()

    def close(self) -> None:
        """Wait for all saves and free everything but the checkpoints. Collective over all groups that were used.

        If closing one name raises an error, the others are still closed.
        """
        with contextlib.ExitStack() as stack:
            for key in sorted(self._members, reverse=True):  # the stack calls the last one first
                stack.callback(self._members[key].checkpointer.close)
            self._members, self._groups = {}, {}
            self._thread.shutdown()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close. After an exception, do not wait for other ranks."""
        if kind is None:
            self.close()
            return
        with contextlib.ExitStack() as stack:
            for member in self._members.values():
                stack.callback(member.checkpointer.__exit__, kind, error, trace)
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _serves(self, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether ids like this one are saved and loaded. If mlflash is off, only URLs are."""
        return self.enabled or _is_url(checkpoint_id)

    def _group(self, process_group: Any) -> Group:
        ranks = _ranks_of(process_group)
        if ranks not in self._groups:
            self._groups[ranks] = Group.of(process_group)
        return self._groups[ranks]

    def _member(self, name: str, group: Group) -> Member:
        key = (name, group.ranks)
        if key not in self._members:
            if sum(ranks == group.ranks for _, ranks in self._members) == _MANY and group.ranks[0] == dist.get_rank():
                log.warning("%d checkpoint ids have slots of their own here. Ids of the same state should differ only "
                            "in their step, such as %s-7steps", _MANY + 1, name)  # fmt: skip
            self._members[key] = self._new_member(name, group)
        return self._members[key]

    def _new_member(self, name: str, group: Group) -> Member:
        # Each name is drained to a directory of its own, because several names have the same steps.
        directory = None if self._directory is None else os.path.join(self._directory, _folder_of(name).lstrip("."))
        settings = {**self._settings, "directory": directory}
        return Member(group, _job_of(self._job, name), settings)

    @contextlib.contextmanager
    def _that_loads(self, name: str, group: Group) -> Iterator[tuple[Member, Group]]:
        """Give the ranks that load a name: this group, or all groups that load it now. Collective over all ranks."""
        ranks = self._everyone.that_load(name, group)
        if ranks == tuple(sorted(group.ranks)):
            yield self._member(name, group), group
            return
        if (own := self._members.pop((name, group.ranks), None)) is not None:
            own.checkpointer.close()  # one job at a time may have this name on a node
        if ranks not in self._groups:
            self._groups[ranks] = Group.of_ranks(ranks)
        every = self._groups[ranks]
        member = self._new_member(name, every)
        try:
            yield member, every
        except BaseException as error:
            self._undefined[name] = member.checkpointer.adapting.undefined
            member.checkpointer.__exit__(type(error), error, None)
            raise
        self._undefined.pop(name, None)
        member.checkpointer.close()

    def _step(self, name: str, step: int | None, member: Member, every: Group) -> int | None:
        """Choose the step to load, by default the newest that can be loaded. Collective over all ranks."""
        return self._everyone.newest(name, every.ranks, step, lambda: member.steps(step))

    def _next(self, name: str, step: int | None) -> int | None:
        """Give the step of a save; None: the step after the newest. After a load, count on from the loaded step."""
        if why := self._undefined.get(name):
            raise StateError("the state is undefined because a load of it failed, so it is not saved: load again first",
                             found=why)  # fmt: skip
        before = self._loaded.pop(name, None)
        return step if before is None or step is not None else before + 1


def _only_one(checkpoint_id: str | os.PathLike[str] | None,
             reader: DistributedFileSystemReader | None) -> str | os.PathLike[str]:  # fmt: skip
    """Give the checkpoint id of a call, which is given directly or in a reader."""
    if checkpoint_id is None and isinstance(reader, DistributedFileSystemReader):
        return reader.checkpoint_id
    if checkpoint_id is not None and reader is None:
        return checkpoint_id
    raise ConfigError(
        "give load either a checkpoint id or a reader that has one", found=f"{checkpoint_id!r} and {reader!r}",
        expected="checkpoint_id=, or storage_reader=fsdp.DistributedFileSystemReader(checkpoint_id)",
    )  # fmt: skip


def _is_url(checkpoint_id: str | os.PathLike[str]) -> bool:
    return "://" in os.fspath(checkpoint_id)


def _job_of(job: str, name: str) -> str:
    """Give the job that the checkpoints of a name have in memory. Different names have different jobs."""
    return f"{job[:37]}.{_folder_of(name)}".replace("..", ".")


def _folder_of(name: str) -> str:
    """Give the folder of a name. It ends with the first eight hexadecimal digits of the name's SHA-256."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    stem = re.sub(r"[^A-Za-z0-9._-]+", "_", name.rpartition("/")[2])[:16]
    return f"{stem}.{digest}"


def _ranks_of(process_group: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))


def _save_in_memory(state_dict: Any, member: Member, step: int | None, *others: Any) -> Metadata:
    try:
        return _save(state_dict, member.writer, step, *others)
    finally:
        member.checkpointer.adapting.end_reservations()  # if it failed on this rank only: this thread continues


def _save(state_dict: Any, writer: StorageWriter, step: int | None, group: Group, coordinator: int, is_first: bool
          ) -> Metadata:  # fmt: skip
    if is_first:
        warn_of_unlike(state_dict, group.ranks, group.planning)
    if step is not None:
        writer.reset(f"step-{step}")
    try:
        return _save_state_dict(state_dict, writer, process_group=group.planning, coordinator_rank=coordinator)
    except dcp.api.CheckpointException as error:  # a BaseException, which would end the thread
        raise SaveFailed(str(error)) from error


def _load_optimizer(reader: StorageReader, step: str | None, key: str, group: Group, loads: Any) -> dict[str, Any]:
    """Load the values under a key, sharded over a group. Collective over the ranks that load together."""
    reader.reset(step)
    metadata = reader.read_metadata()
    state_dict = to_fill(metadata, key, group.process_group)
    reader.reset(step)
    _load(state_dict, reader, loads)
    return dict(unflatten_state_dict(state_dict, metadata.planner_data))


def _load(state_dict: dict[str, Any], reader: StorageReader, group: Any) -> None:
    try:
        dcp.load(state_dict, storage_reader=reader, planner=LoadPlanner(), process_group=group)
    except dcp.api.CheckpointException as error:
        ours = [failure for failure, _ in error.failures.values() if isinstance(failure, MlflashError)]
        raise (ours[0] if ours else StructureMismatch(str(error))) from error


def _agreed(work: Callable[[], Any], group: Any) -> None:
    """Call a function. If it raises on any rank, all ranks raise. Collective over the group."""
    error: Exception | None = None
    try:
        work()
    except Exception as problem:  # the others must not go on without this rank
        error = problem
    said: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, error and text_of(error), group=group)
    if error is not None:
        raise StructureMismatch(f"loading failed: {text_of(error)}", rank=dist.get_rank()) from error
    for rank, why in enumerate(said):
        if why is not None:
            raise StructureMismatch(f"loading failed: {why}", rank=dist.get_global_rank(group, rank))


# Checks before a state dict is filled: whether its shards and its optimizer fit what was saved.


_MOMENTS = "optimizer.state."


class LoadPlanner(DefaultLoadPlanner):
    """DCP's planner, which first checks that a local state dict is sharded over as many ranks as the saved one."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        saved, given = _degree(metadata.state_dict_metadata), _degree(state_dict)
        if saved != given:
            raise StructureMismatch(
                "a local state dict can be loaded only on the same number of shards. A sharded one "
                "(sharded_state_dict) can be loaded on any number",
                expected=saved or "no local state dict",
                found=given or "no local state dict",
            )
        super().set_up_planner(state_dict, metadata, is_coordinator)
        if "optimizer" in state_dict and _has_moments(metadata.state_dict_metadata) > _has_moments(self.state_dict):
            raise StructureMismatch("the optimizer has no state yet that a load could fill: call init_optim_state "
                                    "before you make its state dict", expected=_MOMENTS, found="none")  # fmt: skip


def _has_moments(names: Iterable[str]) -> bool:
    return any(name.startswith(_MOMENTS) for name in names)


def _degree(state_dict: Mapping[str, Any]) -> str:
    return next((key for key in state_dict if str(key).startswith(DEGREE)), "")


# The optimizer's part of a sharded checkpoint, which FSDP1 loads after the model's.


def to_fill(metadata: Metadata, key: str, process_group: Any) -> dict[str, Any]:
    """Make a flat state dict for a load to fill. Collective over the process group.

    Tensors are sharded over the ranks of the group along their first dimension, as FSDP1 shards them. Tensors with one
    element are whole.
    """
    ranks = dist.get_process_group_ranks(process_group)
    kind = dist.distributed_c10d._get_pg_default_device(process_group).type
    devices = [f"{kind}:{rank % torch.cuda.device_count()}" if kind == "cuda" else kind for rank in ranks]
    spec: Any = ChunkShardingSpec
    spec = spec(dim=0, placements=[f"rank:{rank}/{device}" for rank, device in zip(ranks, devices, strict=True)])
    device = devices[dist.get_rank(process_group)]
    found: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if metadata.planner_data[name][0] != key:
            continue
        if isinstance(entry, BytesStorageMetadata):
            found[name] = None
        elif entry.size.numel() == 1:
            found[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
        else:
            found[name] = sharded_tensor.empty(
                spec, entry.size, dtype=entry.properties.dtype, process_group=process_group
            )
    return found


# Checks whether the ranks of a process group can save a state dict together.


def refuse_other_shards(state_dict: Mapping[str, Any], ranks: Sequence[int]) -> None:
    """Refuse a local state dict if other ranks of the group have other shards under the same names. Not collective."""
    if isinstance(state_dict, LocalState) and (others := sorted(state_dict.others & set(ranks))):
        raise StateError(
            "other ranks of this process group hold other shards, under the same names: save each local state under an "
            "id of its own, on the ranks that hold the same shard (fsdp.Ranker(model).get_rep_groups()). Or save "
            "fsdp.sharded_state_dict(model, optimizer) on all ranks together", rank=dist.get_rank(),
            found=f"ranks {others}",
        )  # fmt: skip


def refuse_missing_shards(state_dict: Mapping[str, Any], ranks: Sequence[int]) -> None:
    """Refuse DTensors if the group does not hold all of their shards. Not collective."""
    whole = set[tuple[Any, ...]]()
    for name, value in flatten_state_dict(dict(state_dict))[0].items():
        if not isinstance(value, DTensor) or (kind := (value.device_mesh, *value.placements)) in whole:
            continue
        mesh, placements = value.device_mesh.mesh, value.placements
        places = [[slice(None)] if placement.is_replicate() else range(size)
                  for placement, size in zip(placements, mesh.shape, strict=True)]  # fmt: skip
        for place in itertools.product(*places):
            if not set(mesh[place].flatten().tolist()) & set(ranks):
                raise StateError(
                    "this tensor is sharded over ranks that are not in the process group: save it on all of them "
                    "together, under one id (no tp or ep in it), such as with process_group=None", tensor=name,
                    expected=f"ranks {sorted(mesh.flatten().tolist())}", found=f"ranks {sorted(ranks)}",
                )  # fmt: skip
        whole.add(kind)


def warn_of_unlike(state_dict: Mapping[str, Any], ranks: Sequence[int], group: Any) -> None:
    """Warn if tensors differ between ranks although one rank's values are saved for all.

    Collective over the group.
    """
    plain = (torch.Tensor, torch.nn.Parameter)
    mine = {name: xxhash.xxh3_64_intdigest(live_bytes(value).data)
            for name, value in flatten_state_dict(dict(state_dict))[0].items() if type(value) in plain}  # fmt: skip
    said: list[Any] = [None] * len(ranks)
    dist.all_gather_object(said, mine, group=group)
    first = dict[str, tuple[int, int]]()
    unlike = dict[str, tuple[int, int]]()
    for rank, digests in zip(ranks, said, strict=True):
        for name, digest in digests.items():
            other, known = first.setdefault(name, (rank, digest))
            if known != digest:
                unlike.setdefault(name, (other, rank))
    if unlike and dist.get_rank() == min(ranks):
        name, (rank, other) = next(iter(unlike.items()))
        log.warning("%d tensors, such as %s on ranks %d and %d, differ between ranks that save them together. They are "
                    "not DTensors, so they count as the same, and one rank's values are saved for all. If they should "
                    "differ, as experts do, save them under an id of their own, on the ranks that hold the same values",
                    len(unlike), name, rank, other)  # fmt: skip
