"""A real Megatron Core on CPUs: what it takes for granted of CUDA, and a small GPT in training.

Only the device is pretended: parallel layers, DDP, the distributed optimizer and sharded state dicts are Megatron's
own, over gloo. Import this before anything of Megatron.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import sys
import typing
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import typing_extensions
from cuda_on_cpu import pretend
from left_out import leave_out


def _patched(kind: Any) -> list[tuple[Any, str, Any]]:
    """Let a distributed optimizer use PyTorch's Adam, which counts steps by tensors; Megatron's do without.

    It would have no state before its first step; and Megatron would give all parameters one such tensor, to which each
    adds one, and fill it from the new optimizer.
    """
    tell, fill, load = kind.sharded_state_dict, kind._set_main_param_and_optimizer_states, kind.load_state_dict
    take = kind._get_main_param_and_optimizer_states

    def told(own: Any, model: Any, is_loading: bool = False, **more: Any) -> Any:
        if is_loading and not own.optimizer.state:
            make = getattr(own, "_init_optimizer_states_with_dummy_values", lambda: own.init_state_fn(own.optimizer))
            with torch.no_grad():
                make()
        for values in own.optimizer.state.values():
            values.setdefault("step", torch.zeros(()))
        return tell(own, model, is_loading, **more)

    def loaded(own: Any, state: dict[str, Any]) -> None:
        with torch.no_grad():
            load(own, state)
        (count,) = {group["step"] for group in state["optimizer"]["param_groups"]}
        for values in own.optimizer.state.values():
            values["step"] = torch.tensor(float(count))

    def taken(own: Any, param: Any) -> dict[str, Any]:
        return {name: value for name, value in take(own, param).items() if name != "step"}

    at_all = [(kind, "_get_main_param_and_optimizer_states", taken)] if VERSION < (0, 16) else []
    return [
        *at_all,
        (kind, "sharded_state_dict", told),
        (kind, "_set_main_param_and_optimizer_states",
         lambda own, at, found: fill(own, at, {"step": torch.zeros(()), **found})),
        (kind, "load_state_dict", loaded),
    ]  # fmt: skip


@contextlib.contextmanager
def on_cpu(others: Iterable[tuple[Any, str, Any]] = ()) -> Iterator[None]:
    random = sys.modules["megatron.core.tensor_parallel.random"]
    more = [
        (random, "_get_cuda_rng_state", lambda **kwargs: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", lambda state, **kwargs: torch.set_rng_state(state)),
        *_patched(DistributedOptimizer),
        *others,
    ]
    with pretend(more):
        yield


if getattr(multiprocessing.current_process(), "_inheriting", False):  # Megatron's worker, which imports the main module
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda device: None  # type: ignore[assignment]
    torch.cuda.synchronize = lambda device=None: None
# What Megatron compiles stays as it is: else each process would import the compiler, for two seconds.
torch.compile = lambda function=None, **options: function or (lambda other: other)  # type: ignore[assignment]
if not hasattr(typing, "override"):  # Megatron's training loop is for Python 3.12
    typing.override = typing_extensions.override  # type: ignore[attr-defined]
if not hasattr(np, "product"):  # NumPy 2 does not have it, and Megatron Core 0.15 takes it
    np.product = np.prod  # type: ignore[attr-defined]
leave_out("megatron.core.transformer.moe.ops.paged_stash")  # kernels that need Triton
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing import ShardedObject
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.transformer import MegatronModule, TransformerConfig

VERSION = tuple(int(number) for number in megatron.core.__version__.split(".")[:2])
CUT = "dp_reshardable"  # how the distributed optimizer cuts its state for a local checkpoint
VOCABULARY, LENGTH = 128, 16


def end_groups() -> None:
    """End all process groups but the default one. No rank may need them any more."""
    parallel_state.destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()  # of what refers to them


def _parallel(**sizes: Any) -> None:
    parallel_state.destroy_model_parallel()  # of the training before
    parallel_state.initialize_model_parallel(**sizes)
    tensor_parallel.get_cuda_rng_tracker().reset()
    tensor_parallel.model_parallel_cuda_manual_seed(7)


class Training:
    """A GPT of two layers in training; collective over all ranks of torch.distributed.

    Args:
        tensor: ranks that share each layer.
        sharded: whether the optimizer's state is spread over data-parallel ranks.
        overlaps: whether their shares of the weights are gathered in the next forward pass.
        experts, expert_tensor: ranks over which experts are spread, and each is cut.

    Attributes:
        step: steps done.
        losses: loss and gradient norm of each.
    """

    def __init__(self, tensor: int = 1, sharded: bool = True, overlaps: bool = False, experts: int = 1,
                 expert_tensor: int | None = None):  # fmt: skip
        _parallel(tensor_model_parallel_size=tensor, expert_model_parallel_size=experts,
                  expert_tensor_parallel_size=expert_tensor)  # fmt: skip
        config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True,
                                   tensor_model_parallel_size=tensor, attention_dropout=0.1, hidden_dropout=0.1,
                                   bias_dropout_fusion=False, masked_softmax_fusion=False,
                                   gradient_accumulation_fusion=False)  # fmt: skip
        torch.manual_seed(7)
        gpt = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=LENGTH,
                       parallel_output=True)  # fmt: skip
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=sharded, overlap_grad_reduce=overlaps,
                                            overlap_param_gather=overlaps, grad_reduce_in_fp32=True)  # fmt: skip
        self.model = DistributedDataParallel(config, ddp, gpt)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                lr=1e-2, clip_grad=0.0, use_distributed_optimizer=sharded, bf16=False, overlap_param_gather=overlaps
            ),
            [self.model],
        )
        self.sharded = sharded
        self.replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.step = 0
        self.losses: list[tuple[float, float]] = []

    def train(self, last: int) -> None:
        """Train to a step, on batches that depend on nothing but the step and the data-parallel rank."""
        while self.step < last:
            self.step += 1
            seed = 1000 * self.step + parallel_state.get_data_parallel_rank()
            numbers = torch.Generator().manual_seed(seed)
            tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=numbers)
            positions = torch.arange(LENGTH).repeat(2, 1)
            mask = torch.ones(LENGTH, LENGTH).tril().logical_not()[None, None]
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            loss = self.model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous()).float().mean()
            loss.backward()
            finalize_model_grads([self.model])
            _, norm, _ = self.optimizer.step()
            self.losses.append((loss.item(), float(norm)))

    def sharded_state(self, is_loading: bool = False) -> dict[str, Any]:
        metadata = {"distrib_optim_sharding_type": CUT, "singleton_local_shards": False,
                    "chained_optim_avoid_prefix": True, "dp_cp_group": self.replicas}  # fmt: skip
        model = self.model.module.sharded_state_dict(metadata=metadata)
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        random = {"torch": torch.get_rng_state(), "tracker": tensor_parallel.get_cuda_rng_tracker().get_states()}
        place = (parallel_state.get_tensor_model_parallel_rank(), dist.get_rank(self.replicas))
        sizes = (dist.get_world_size() // self.replicas.size(), self.replicas.size())
        numbers = ShardedObject("rng_state", random, sizes, place)
        return {"model": model, "optimizer": optimizer, "rng_state": numbers, "iteration": self.step}

    def load(self, state: dict[str, Any]) -> None:
        self.model.module.load_state_dict(state["model"])
        with torch.no_grad():
            self.optimizer.load_state_dict(state["optimizer"])
        if "rng_state" in state:
            torch.set_rng_state(state["rng_state"]["torch"])
            tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_state"]["tracker"])
        self.step = state["iteration"]


class _Parts(MegatronModule):
    """Modules side by side; the loss is a sum over their parameters, with factors that follow from a seed."""

    def __init__(self, config: TransformerConfig, parts: Iterable[torch.nn.Module]):
        super().__init__(config)
        self.parts = torch.nn.ModuleList(parts)

    def forward(self, seed: int) -> torch.Tensor:
        numbers = torch.Generator().manual_seed(seed)
        return sum((part * torch.randn(part.shape, generator=numbers)).sum() for part in self.parameters())


class PartsTraining(Training):
    """Any modules in training, on data-parallel ranks only.

    Args:
        parts: the modules.
        bucket: the least number of parameters in a bucket of gradients. None: all are in one bucket.
    """

    def __init__(self, parts: Iterable[torch.nn.Module], bucket: int | None = None):
        _parallel()
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True,
                                   gradient_accumulation_fusion=False)  # fmt: skip
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True,
                                            overlap_grad_reduce=bucket is not None, bucket_size=bucket)  # fmt: skip
        self.model = DistributedDataParallel(config, ddp, _Parts(config, parts))
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(lr=1e-2, clip_grad=0.0, use_distributed_optimizer=True, bf16=False), [self.model]
        )
        self.replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.step = 0

    def train(self, last: int) -> None:
        """Train to a step; gradients depend on nothing but the step."""
        while self.step < last:
            self.step += 1
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            self.model(self.step).backward()
            self.model.finish_grad_sync()
            self.optimizer.step()

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """What the optimizer holds of each parameter, whole and flat, from the parts that all ranks have of it."""
        names = {parameter: name for name, parameter in self.model.module.named_parameters()}
        own = []
        for part in self.optimizer.chained_optimizers:
            for parameter in part.model_param_gbuf_map:
                start = part._get_model_param_range_map(parameter)["param"].start
                values = part._get_main_param_and_optimizer_states(parameter)
                kept = {key: value.detach().clone() for key, value in values.items() if key != "step"}
                own.append((names[parameter], start, kept))
        parts: list[Any] = [None] * dist.get_world_size(self.replicas)
        dist.all_gather_object(parts, own, self.replicas)
        whole: dict[str, dict[str, torch.Tensor]] = {}
        for name, _, values in sorted(itertools.chain.from_iterable(parts), key=lambda entry: entry[:2]):
            before = whole.setdefault(name, {})
            for key, value in values.items():
                before[key] = torch.cat([before[key], value]) if key in before else value
        return whole


def whole_and_first(tensor: int, sharded: bool) -> tuple[tuple[list[tuple[float, float]], bytes], Training]:
    """Losses of steps 4 to 6 and the last weights of a training that nothing happens to; and one that is at step 3."""
    whole = Training(tensor, sharded)
    whole.train(6)
    expected = whole.losses[3:], digest(whole)
    first = Training(tensor, sharded)
    first.train(3)
    return expected, first


def digest(training: Training) -> bytes:
    tensors = [tensor for _, tensor in sorted(training.model.module.state_dict().items()) if torch.is_tensor(tensor)]
    return b"".join(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)


__all__ = ["PartsTraining", "Training", "digest", "dist", "on_cpu", "whole_and_first"]


def virtual_pipeline() -> tuple[list[Any], Any]:
    """The two chunks that each of two pipeline stages has of a model of four layers, and their optimizer."""
    _parallel(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    config = TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True,
                               pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2,
                               pipeline_dtype=torch.float32, bias_dropout_fusion=False, masked_softmax_fusion=False,
                               gradient_accumulation_fusion=False)  # fmt: skip
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    chunks = []
    for stage in range(2):
        is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        gpt = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=LENGTH,
                       parallel_output=True, share_embeddings_and_output_weights=False, vp_stage=stage,
                       pre_process=is_first, post_process=is_last)  # fmt: skip
        chunks.append(DistributedDataParallel(config, ddp, gpt, disable_bucketing=stage > 0))
    settings = OptimizerConfig(lr=1e-2, clip_grad=0.0, use_distributed_optimizer=True, bf16=False)
    return chunks, get_megatron_optimizer(settings, chunks)
