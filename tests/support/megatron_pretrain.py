"""A small GPT that Megatron-LM's own training loop trains on CPUs, as pretrain_gpt.py does.

Usage: megatron_pretrain.py MEGATRON'S FLAGS; torch.distributed is there already. Records go to the folder $OUT.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron_on_cpu import on_cpu, parallel_state, tensor_parallel
from random_texts import Texts, text_of

from mlflash.adapters.replacing import replaced

LENGTH = 16
FLAGS = f"""
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length {LENGTH} --max-position-embeddings {LENGTH}
    --micro-batch-size 2 --train-iters 100 --lr 1e-2 --lr-decay-style constant --eval-iters 0 --eval-interval 1000
    --tokenizer-type NullTokenizer --vocab-size 127 --mock-data --dataloader-type single --num-workers 0
    --attention-dropout 0 --hidden-dropout 0 --clip-grad 0 --log-interval 1 --transformer-impl local
    --no-persist-layer-norm --no-bias-dropout-fusion --no-masked-softmax-fusion --no-gradient-accumulation-fusion
    --use-cpu-initialization --distributed-backend gloo --ckpt-format torch_dist --save-interval 1000
""".split()


class Tokens(Texts):
    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"tokens": text_of(number, LENGTH + 1, 128)}


def pretrain(flags: Sequence[str], note: Callable[[int, float, float], None]) -> list[torch.nn.Module]:
    """Train with these flags besides `FLAGS`. Collective over all ranks of torch.distributed.

    Args:
        note: gets the number, the loss and the gradient norm of each step.

    Returns:
        The model, which has a part for each pipeline stage of this rank.

    Raises:
        SystemExit: at ``--exit-interval``, as Megatron does.
    """
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.training import initialize, training
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args

    made: list[torch.nn.Module] = []

    def model(pre_process: bool = True, post_process: bool = True, **kwargs: Any) -> GPTModel:
        tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
        model = GPTModel(core_transformer_config_from_args(args), get_gpt_layer_local_spec(), vocab_size=128,
                         max_sequence_length=LENGTH, pre_process=pre_process, post_process=post_process)  # fmt: skip
        made.append(model)
        return model

    def forward(batches: Iterator[dict[str, torch.Tensor]], model: Callable[..., torch.Tensor]) -> tuple[Any, Any]:
        tokens = next(batches)["tokens"]
        positions = torch.arange(LENGTH).repeat(len(tokens), 1)
        mask = torch.ones(LENGTH, LENGTH).tril().logical_not()[None, None]
        out = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous())
        return out, lambda out: (out.float().mean(), {"lm loss": out.float().mean().detach()})

    def logged(log: Any, losses: Any, total: Any, rate: Any, step: int, *more: Any, **named: Any) -> Any:
        note(step, float(losses["lm loss"]), float(more[3]))
        return log(losses, total, rate, step, *more, **named)

    def data(counts: Sequence[int | None]) -> list[Tokens]:
        return [Tokens(count or 1) for count in counts]

    data.is_distributed = True  # type: ignore[attr-defined]
    others = [
        (training, "initialize_megatron", functools.partial(training.initialize_megatron, allow_no_cuda=True)),
        (training, "training_log", functools.partial(logged, training.training_log)),
        (training, "set_jit_fusion_options", lambda *args, **kwargs: None),
        (training, "report_memory", lambda *args, **kwargs: None),
        (initialize, "_compile_dependencies", lambda: None),
    ]
    with on_cpu(others):
        with replaced(sys, argv=[sys.argv[0], *FLAGS, *flags]):  # Megatron's worker begins with those of this process
            args = parse_and_validate_args()
        parallel_state.initialize_model_parallel(args.tensor_model_parallel_size)
        training.pretrain(pretrain_cfg_container_from_args(args), data, ModelType.encoder_or_decoder, forward, model)
    return made


def main(flags: Sequence[str]) -> None:
    """Train, and note each loss."""
    from records import note

    try:
        pretrain(flags, lambda step, loss, norm: note("loss", step=step, loss=loss, norm=norm))
    except SystemExit as end:
        assert not end.code
    note("end")


if __name__ == "__main__":
    main(sys.argv[1:])
