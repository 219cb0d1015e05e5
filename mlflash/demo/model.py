"""A small GPT over bytes: about a million parameters, with dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 256  # bytes


class Block(nn.Module):  # type: ignore[misc]
    """Attention and a two-layer network, each behind a layer norm and added to its input."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        """Map ``(batch, length, width)`` to the same shape."""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + F.dropout(self.out(seen.transpose(1, 2).flatten(2)), p)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), p)


class GPT(nn.Module):  # type: ignore[misc]
    """A model that predicts the next byte. Input and output embedding are the same tensor.

    Args:
        context: length of the longest sequence, in bytes.
        width: width of the residual stream.
        depth: number of blocks.
        heads: attention heads per block.
        dropout: probability of dropout.
    """

    def __init__(self, context: int, width: int = 128, depth: int = 5, heads: int = 4, dropout: float = 0.1):
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens: Any, targets: Any) -> Any:
        """Return the mean cross-entropy in nats.

        Args:
            tokens: bytes, ``(batch, length)``.
            targets: the byte that follows each, ``(batch, length)``.
        """
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
