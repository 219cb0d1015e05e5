"""Train three small models for thousands of steps, save each step, and see that no value is called suspect.

    python tests/campaigns/clean_campaign.py --steps 10000

A transformer in float32, the same in bfloat16 with its optimizer's state in float32, and a mixture of experts whose
router leaves some of them out. All of the values are looked at in each save.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from typing import Any

import torch
from torch import nn

import mlflash

_WORDS, _LONG, _WIDE = 64, 16, 32


class Experts(nn.Module):
    """A layer of which each token takes one part."""

    def __init__(self, wide: int, experts: int = 4):
        super().__init__()
        self.router = nn.Linear(wide, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(wide, 4 * wide), nn.GELU(), nn.Linear(4 * wide, wide)) for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        best = weights.argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = best == number
            if chosen.any():
                out[chosen] = expert(x[chosen]) * weights[chosen][:, number : number + 1]
        return out


class Model(nn.Module):
    """A transformer of two layers, or with experts in the place of what follows attention."""

    def __init__(self, has_experts: bool):
        super().__init__()
        self.embed = nn.Embedding(_WORDS, _WIDE)
        self.attention = nn.MultiheadAttention(_WIDE, 4, batch_first=True)
        self.norm = nn.LayerNorm(_WIDE)
        feed = nn.Sequential(nn.Linear(_WIDE, 4 * _WIDE), nn.GELU(), nn.Linear(4 * _WIDE, _WIDE))
        self.feed = Experts(_WIDE) if has_experts else feed
        self.head = nn.Linear(_WIDE, _WORDS)
        self.register_buffer("attention_mask", torch.full((_LONG, _LONG), float("-inf")).triu(1))
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.attention(self.norm(x), self.norm(x), self.norm(x), attn_mask=self.attention_mask)[0]
        found: torch.Tensor = self.head(x + self.feed(self.norm(x)))
        return found


class InBfloat16:
    """AdamW over float32 copies of parameters in bfloat16, as mixed precision has it."""

    def __init__(self, model: nn.Module, lr: float):
        self.parameters = [*model.parameters()]
        self.masters = [parameter.detach().float().requires_grad_() for parameter in self.parameters]
        self.inner = torch.optim.AdamW(self.masters, lr=lr)

    def step(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        self.inner.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)

    def state(self) -> dict[str, Any]:
        return {"inner": self.inner, "masters": self.masters}


def train(kind: str, steps: int) -> int:
    """Train and save each step; gives at how many something was called suspect."""
    torch.manual_seed(0)
    model = Model(has_experts=kind == "moe")
    rate = 3e-3
    if kind == "bf16":
        model = model.bfloat16()
    mixed = InBfloat16(model, rate) if kind == "bf16" else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate) if mixed is None else mixed.inner
    with (
        tempfile.TemporaryDirectory(prefix="mlflash-clean-", dir="/dev/shm") as memory,
        mlflash.Checkpointer(memory=memory, job=kind, redundancy="none", check_values=1.0) as ckpt,
    ):
        for step in range(1, steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, step / 200)
            tokens = torch.randint(_WORDS, (8, _LONG))
            logits = model(tokens).float()
            loss = nn.functional.cross_entropy(logits.reshape(-1, _WORDS), (tokens * 7 % _WORDS).reshape(-1))
            model.zero_grad()
            loss.backward()
            optimizer.step() if mixed is None else mixed.step()
            state = {"model": model, "optimizer": optimizer if mixed is None else mixed.state()}
            ckpt.save(step, state)
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
