"""torch.distributed from MPI takes torch's own arguments; what cannot be honoured is refused on all ranks."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

from mlflash import errors
from mlflash.adapters.distributed import init_process_group

pytestmark = pytest.mark.mpi(min_size=2)
HOST = "127.0.0.1"


@contextlib.contextmanager
def started(*args: Any, **more: Any) -> Iterator[Any]:
    """The default process group, while it is there."""
    init_process_group(*args, **{"host": HOST, **more})
    try:
        yield dist.distributed_c10d._get_default_group()
    finally:
        dist.destroy_process_group()


def refused(*args: Any, **more: Any) -> errors.MlflashError:
    with pytest.raises(errors.MlflashError) as raised, started(*args, **more):
        pass
    assert not dist.is_initialized()
    return raised.value


def test_the_arguments_are_those_of_torch_in_its_order_and_then_ours_by_name_only() -> None:
    of_torch = [name for name in inspect.signature(dist.init_process_group).parameters if not name.startswith("_")]
    parameters = inspect.signature(init_process_group).parameters
    by_name = [name for name, one in parameters.items() if one.kind is inspect.Parameter.KEYWORD_ONLY]
    if of_torch[-1] == "enable_reconfigure":  # since 2.14: such a group has no communicator until it is reconfigured
        with pytest.raises(TypeError, match="unexpected keyword argument 'enable_reconfigure'"):
            init_process_group(**{of_torch.pop(): True})
    assert list(parameters) == [*of_torch, *by_name] and by_name == ["comm", "host"]


@pytest.mark.gate
def test_what_torch_is_called_with_starts_the_ranks_of_mpi(comm: Any) -> None:
    minute = datetime.timedelta(minutes=1)
    cpu = torch.device("cpu")
    for args in (("gloo",), ("gloo", "env://", minute, comm.size, comm.rank, None, "name", None, None), ()):
        with started(*args) as group:
            assert (dist.get_rank(), dist.get_world_size()) == (comm.rank, comm.size)
            assert os.environ["RANK"] == str(comm.rank) and os.environ["WORLD_SIZE"] == str(comm.size)
            if args:
                assert dist.get_backend() == "gloo"
            if len(args) > 1:
                assert group._get_backend(cpu).options._timeout == minute
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total == comm.size
    with pytest.raises(ValueError, match="device_id parameter must be"):  # torch itself has got it
        init_process_group(device_id=cpu, host=HOST, comm=MPI.COMM_SELF)


def test_a_communicator_is_given_by_name(comm: Any) -> None:
    reverse = comm.Split(0, -comm.rank)
    with started(comm=reverse, rank=comm.size - 1 - comm.rank):
        assert dist.get_rank() == comm.size - 1 - comm.rank
    reverse.Free()


def test_a_communicator_in_the_place_of_the_backend_is_refused_and_it_says_how_it_is_given(comm: Any) -> None:
    for error in (refused(comm), refused(comm, "gloo")):
        assert type(error) is errors.ConfigError and "give a communicator as comm=" in str(error)
        assert "Intracomm" in str(error)
    assert "a communicator of MPI" in str(refused(comm="gloo"))


@pytest.mark.parametrize("more", [{"init_method": "tcp://127.0.0.1:1"}, {"init_method": "gloo"},
                                  {"store": dist.HashStore()}])  # fmt: skip
def test_another_way_to_find_each_other_is_refused_on_all_ranks_and_it_says_what_to_do(comm: Any, more: Any) -> None:
    error = refused(**more)
    (name,) = more
    assert type(error) is errors.ConfigError and str(error).startswith(f"{name}: leave it out")
    assert "torch.distributed's own" in str(error)


@pytest.mark.gate
def test_what_only_one_rank_is_given_is_refused_on_all_ranks(comm: Any) -> None:
    last = comm.size - 1
    mine = comm.rank == last
    for more in ({"rank": 0}, {"world_size": comm.size + 1}):
        error = refused(**(more if mine else {}))
        assert (
            type(error) is errors.WorldMismatch and error.rank == last and f"rank {last} of {comm.size}" in str(error)
        )
        assert "comm=" in str(error)
    assert type(refused(timeout=60 if mine else None)) is errors.ConfigError
