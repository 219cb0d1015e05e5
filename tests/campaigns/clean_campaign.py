"""Train three small models for thousands of steps, save each step, and see that no value is called suspect.

    python tests/campaigns/clean_campaign.py --steps 10000

A transformer in float32, the same in bfloat16 with its optimizer's state in float32, and a mixture of experts whose
router leaves some of them out. All of the values are looked at in each save.
"""

from __future__ import annotations

import argparse
import sys
import tempfile

import torch
from torch import nn

import mlflash

_WORDS, _LONG, _WIDE, _RATE = 64, 16, 32, 3e-3


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(_WIDE, 4)
        self.experts = nn.ModuleList(nn.Linear(_WIDE, _WIDE) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, best = self.router(x).softmax(-1).max(-1, keepdim=True)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = (best == number).squeeze(-1)
            if chosen.any():
                out[chosen] = expert(x[chosen]) * weight[chosen]
        return out


class Model(nn.Module):
    """A transformer of one layer, perhaps with experts after it."""

    def __init__(self, has_experts: bool):
        super().__init__()
        self.embed = nn.Embedding(_WORDS, _WIDE)
        self.layer = nn.TransformerEncoderLayer(_WIDE, 4, 4 * _WIDE, 0.0, "gelu", batch_first=True, norm_first=True)
        self.experts = Experts() if has_experts else nn.Identity()
        self.head = nn.Linear(_WIDE, _WORDS)
        self.register_buffer("attention_mask", torch.full((_LONG, _LONG), float("-inf")).triu(1))
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.embed(tokens), src_mask=self.attention_mask)
        logits: torch.Tensor = self.head(x + self.experts(x))
        return logits.float()


@torch.no_grad()
def step_in_float32(model: nn.Module, masters: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Step float32 copies of parameters in bfloat16, as mixed precision does."""
    for parameter, master in zip(model.parameters(), masters, strict=True):
        master.grad = None if parameter.grad is None else parameter.grad.float()
    optimizer.step()
    for parameter, master in zip(model.parameters(), masters, strict=True):
        parameter.copy_(master)


def train(kind: str, steps: int) -> int:
    torch.manual_seed(0)
    model = Model(has_experts=kind == "moe")
    if kind == "bf16":
        model = model.bfloat16()
    masters = [parameter.detach().float() for parameter in model.parameters()] if kind == "bf16" else []
    optimizer = torch.optim.AdamW(masters or model.parameters(), lr=_RATE)
    with (
        tempfile.TemporaryDirectory(prefix="mlflash-clean-", dir="/dev/shm") as memory,
        mlflash.Checkpointer(memory=memory, job=kind, redundancy="none", check_values=1.0) as ckpt,
    ):
        for step in range(1, steps + 1):
            optimizer.param_groups[0]["lr"] = _RATE * min(1.0, step / 200)
            tokens = torch.randint(_WORDS, (8, _LONG))
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens * 7 % _WORDS).flatten())
            model.zero_grad()
            loss.backward()
            step_in_float32(model, masters, optimizer) if masters else optimizer.step()
            ckpt.save(step, {"model": model, "optimizer": optimizer, "masters": masters})
        ckpt.wait()
        ckpt.steps()
        counts = ckpt.report()["counts"]
    print(f"{kind}: {counts['committed']} of {steps} steps saved, {counts.get('suspect', 0)} called suspect, "
          f"last loss {float(loss.detach()):.3f}", flush=True)  # fmt: skip
    return int(counts.get("suspect", 0)) + (counts["committed"] != steps)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    alarms = [train(kind, steps) for kind in ("fp32", "bf16", "moe")]
    return int(any(alarms))


if __name__ == "__main__":
    sys.exit(main())
