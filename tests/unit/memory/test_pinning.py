"""Slots that CUDA page-locks; CUDA itself is played, as it is not here."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from mlflash.memory.node_directory import NodeDirectory
from mlflash.memory.shared_memory_segment import create

PORTABLE = 1


class Cudart:
    """What torch.cuda.cudart() gives.

    Args:
        status: of cudaHostRegister; 0: it works.
    """

    def __init__(self, status: int):
        self.status = status
        self.asked: list[tuple[int, int, int]] = []
        self.pinned: list[int] = []
        self.launches = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.asked.append((address, nbytes, flags))
        self.pinned += [address] * (self.status == 0)
        return self.status

    def cudaHostUnregister(self, address: int) -> None:
        self.pinned.remove(address)


@pytest.fixture(params=[0, 2])
def cudart(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cudart:
    played = Cudart(request.param)

    def zeros(*shape: int, device: str) -> None:
        played.launches += 1
        raise RuntimeError("CUDA error: out of memory")  # that of the call before, as torch says it at a launch

    cuda = SimpleNamespace(is_available=lambda: True, cudart=lambda: played)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, zeros=zeros))
    return played


def test_a_segment_is_pinned_once_for_all_devices(node_memory: NodeDirectory, cudart: Cudart) -> None:
    segment = create(node_memory, 10_000)
    address = segment.view.ctypes.data
    segment.pin()
    segment.pin()
    assert cudart.asked == [(address, 12_288, PORTABLE)]
    assert cudart.pinned == ([address] if cudart.status == 0 else [])
    segment.close()
    assert cudart.pinned == []


def test_an_error_of_pinning_does_not_stay_for_the_next_kernel(node_memory: NodeDirectory, cudart: Cudart) -> None:
    create(node_memory, 10_000).pin()
    assert cudart.launches == (1 if cudart.status else 0)


def test_a_mapping_that_several_have_is_pinned_once_until_the_last_has_closed_it(
    node_memory: NodeDirectory, cudart: Cudart
) -> None:
    """A restore maps what training has mapped once more, and closes one of the two; to pin anew costs a copy."""
    first = create(node_memory, 10_000)
    first.pin()
    second = first.duplicate()
    second.pin()
    first.close()
    first.close()
    second.duplicate().close()
    assert len(cudart.asked) == 1
    assert len(cudart.pinned) == (cudart.status == 0)
    second.close()
    assert cudart.pinned == []
