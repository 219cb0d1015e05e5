"""A model of tensor parallelism, whose fused layers are cut by ranks, becomes one that Hugging Face's readers open."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_models import settings
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch_jobs import COMM, job
from waiting import until

from mlflash.adapters import fsdp

pytestmark = [
    pytest.mark.mpi(min_size=4),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),  # torch's
]

HIDDEN, INNER, TOKENS, LAYERS, TENSOR_RANKS = 16, 24, 32, 2, 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": TOKENS,
    "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
# Each tensor rank has its own part of query, key and value in one matrix; so it is with gate and up.
CONVERT = r"""
import re, torch

TENSOR_RANKS = 2
PLAIN = {"out": "self_attn.o_proj", "down": "mlp.down_proj", "before": "input_layernorm",
         "after": "post_attention_layernorm"}
FUSED = {"qkv": [f"self_attn.{part}_proj" for part in "qkv"], "gate_up": ["mlp.gate_proj", "mlp.up_proj"]}
OTHERS = {"tokens.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight",
          "head.weight": "lm_head.weight"}

def to_llama(tensors):
    made = {OTHERS[name]: tensors.pop(name) for name in OTHERS}
    for name, tensor in tensors.items():
        number, what = re.fullmatch(r"layers\.(\d+)\.(\w+)\.weight", name).groups()
        parts = FUSED.get(what) or [PLAIN[what]]
        of_rank = [part.chunk(len(parts)) for part in tensor.chunk(TENSOR_RANKS if what in FUSED else 1)]
        for at, part in enumerate(parts):
            made[f"model.layers.{number}.{part}.weight"] = torch.cat([rows[at] for rows in of_rank])
    return made
"""
STOCK = """
import sys
sys.modules["mlflash"] = None  # importing it fails
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
expected = torch.load("expected.pt")
model, report = AutoModelForCausalLM.from_pretrained("out", output_loading_info=True)
assert not any(report.values()), report
for found in (model.state_dict(), load_file("out/model.safetensors")):
    assert found.keys() == expected.keys(), set(found) ^ set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
"""


class Model(torch.nn.Module):
    """The weights of a Llama, by other names, queries, keys and values in one matrix; they are only kept."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = torch.nn.Embedding(TOKENS, HIDDEN), torch.nn.Linear(HIDDEN, TOKENS, bias=False)
        self.layers, self.norm = torch.nn.ModuleList(), torch.nn.RMSNorm(HIDDEN)
        sizes = {"qkv": (HIDDEN, 3 * HIDDEN), "out": (HIDDEN, HIDDEN), "gate_up": (HIDDEN, 2 * INNER),
                 "down": (INNER, HIDDEN)}  # fmt: skip
        for _ in range(LAYERS):
            parts = {name: torch.nn.Linear(*size, bias=False) for name, size in sizes.items()}
            norms = {name: torch.nn.RMSNorm(HIDDEN) for name in ("before", "after")}
            self.layers.append(torch.nn.ModuleDict({**parts, **norms}))

    def forward(self) -> None:
        """FSDP2 wants one."""


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model in tensor parallelism and FSDP2, one step old."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (4 // TENSOR_RANKS, TENSOR_RANKS), mesh_dim_names=("data", "tensor"))
    model = Model()
    how: dict[str, Any] = {"tokens": RowwiseParallel(), "head": ColwiseParallel()}
    for n in range(LAYERS):
        how |= {f"layers.{n}.{name}": ColwiseParallel() for name in ("qkv", "gate_up")}
        how |= {f"layers.{n}.{name}": RowwiseParallel() for name in ("out", "down")}
    parallelize_module(model, mesh["tensor"], how)
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() - 1
    optimizer.step()
    return model, optimizer


def by_hand(model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What Hugging Face has, of whole tensors under our names."""
    found = {"model.embed_tokens.weight": model["tokens.weight"], "model.norm.weight": model["norm.weight"],
             "lm_head.weight": model["head.weight"]}  # fmt: skip
    plain = {"out": "self_attn.o_proj", "down": "mlp.down_proj", "before": "input_layernorm",
             "after": "post_attention_layernorm"}  # fmt: skip
    fused = {"qkv": [f"self_attn.{one}_proj" for one in "qkv"], "gate_up": ["mlp.gate_proj", "mlp.up_proj"]}
    for n in range(LAYERS):
        found |= {f"model.layers.{n}.{new}.weight": model[f"layers.{n}.{old}.weight"] for old, new in plain.items()}
        for old, new in fused.items():
            of_rank = [part.chunk(len(new)) for part in model[f"layers.{n}.{old}.weight"].chunk(TENSOR_RANKS)]
            found |= {f"model.layers.{n}.{name}.weight": torch.cat([parts[at] for parts in of_rank])
                      for at, name in enumerate(new)}  # fmt: skip
    return found


def run(root: Path, *command: object) -> None:
    """Run a command in a process of its own, which is no rank of this job."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI", "HYDI", "MPI_"))}
    done = subprocess.run([str(word) for word in (sys.executable, *command)], env=environment, cwd=root, timeout=60,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_from_pretrained_opens_what_tensor_parallelism_has_saved(root: Path) -> None:
    with job(), fsdp.Checkpoints(**settings(root, directory=root / "pfs", drain_every=1)) as checkpoints:
        model, optimizer = trained()
        checkpoints.async_save(fsdp.sharded_state_dict(model, optimizer), "step-1/all")
        checkpoints.maybe_finalize_async_calls()
        full = fsdp.full_state_dict(model, optimizer)["model"]
    if COMM.rank == 0:
        try:
            read_by_others(root, full)
        finally:
            (root / "done").touch()
    until((root / "done").exists, "the readers")  # asleep: a rank in a barrier would take a core from them


def read_by_others(root: Path, full: dict[str, torch.Tensor]) -> None:
    torch.save(by_hand(full), root / "expected.pt")
    (root / "convert.py").write_text(CONVERT)
    (root / "config").mkdir()
    (root / "config" / "config.json").write_text(json.dumps(CONFIG))
    (drained,) = (root / "pfs").iterdir()
    run(root, "-W", "error", "-m", "mlflash", "export", "newest", "out", "--to", "safetensors", "--keep", "model.*",
        "--rename", r"^model\.", "", "--convert", "convert.py:to_llama", "--hf-config", "config",
        "--directory", drained, "--memory", root)  # fmt: skip
    run(root, "-c", STOCK)
