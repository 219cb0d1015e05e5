"""Checks before a state dict is filled: whether its shards and its optimizer fit what was saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from mlflash.errors import StructureMismatch

from .states import DEGREE

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
