"""The classes of nvidia-resiliency-ext that Megatron, NeMo and Bridge look for: NVRx's own where it is installed.

Without it the same names with the same meaning, so that nothing here needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

try:
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest
    from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager import (
        BaseCheckpointManager,
        CheckpointingException,
    )

    HAVE_NVRX = True
except ImportError:
    HAVE_NVRX = False

    class CheckpointingException(Exception):  # type: ignore[no-redef]  # noqa: N818  (NVRx's name)
        """A local checkpoint was not saved, or cannot be loaded."""

    class TensorAwareStateDict:  # type: ignore[no-redef]
        """A state dict whose tensors can be taken out and put back."""

    class BaseCheckpointManager:  # type: ignore[no-redef]
        """What managers of local checkpoints have in common."""

    class AsyncRequest(NamedTuple):  # type: ignore[no-redef]
        """Something to be done behind the training, and what to do when all ranks have done it.

        Attributes:
            async_fn: what is to be done elsewhere; None: nothing.
            async_fn_args, async_fn_kwargs: its arguments.
            finalize_fns: called one after the other by the training, when all ranks are through.
            preload_fn: called before; brings tensors off the GPU.
            is_frozen: whether ``finalize_fns`` must stay as they are.
            call_idx: counts the requests of a queue.
        """

        async_fn: Callable[..., Any] | None
        async_fn_args: tuple[Any, ...]
        finalize_fns: list[Callable[[], Any]]
        async_fn_kwargs: dict[str, Any] | None = None
        preload_fn: Callable[[], Any] | None = None
        is_frozen: bool = False
        call_idx: int = 0

        def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
            """Add a function to be called at the end.

            Raises:
                RuntimeError: the request was frozen.
            """
            if self.is_frozen:
                raise RuntimeError("Cannot add finalization functions to a frozen AsyncRequest")
            self.finalize_fns.append(fn)

        def execute_sync(self) -> None:
            """Do all of it now. Collective over the ranks of torch.distributed."""
            arguments = list(self.async_fn_args)
            if self.preload_fn is not None:
                arguments[1] = self.preload_fn()
            if self.async_fn is not None:
                self.async_fn(*arguments, **(self.async_fn_kwargs or {}))
            torch.distributed.barrier()
            self.execute_finalize_fns(validate_matching_call_idx=False)

        def freeze(self) -> AsyncRequest:
            """Give the same request, to which nothing can be added."""
            return self._replace(is_frozen=True)

        def execute_finalize_fns(self, validate_matching_call_idx: bool = True) -> int:
            """Call the functions for the end; collective over the ranks of torch.distributed where validated."""
            for finalize in self.finalize_fns:
                finalize()
            if validate_matching_call_idx and torch.distributed.is_initialized():
                device = "cuda" if torch.cuda.is_available() else "cpu"
                newest = torch.tensor([self.call_idx], dtype=torch.int, device=device)
                torch.distributed.all_reduce(newest, op=torch.distributed.ReduceOp.MAX)
                assert newest.item() == self.call_idx, "not all ranks take part in finalizing this request"
            return self.call_idx


def work_without_nvrx() -> None:
    """Let Megatron make its tensor-aware state dicts where NVRx, whose base class they would have, is not installed."""
    from megatron.core.dist_checkpointing import tensor_aware_state_dict

    tensor_aware_state_dict.HAVE_NVRX = True


__all__ = ["HAVE_NVRX", "AsyncRequest", "BaseCheckpointManager", "CheckpointingException", "TensorAwareStateDict",
           "work_without_nvrx"]  # fmt: skip
