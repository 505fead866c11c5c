"""A Llama written with torch alone, for measuring what torch's own ways of parallel training make of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    ffn: int
    seq: int
    vocab: int


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        h, self.heads, self.head_dim = shape.hidden, shape.heads, shape.hidden // shape.heads
        self.norm1, self.norm2 = nn.RMSNorm(h), nn.RMSNorm(h)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(h, h, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(h, shape.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.ffn, h, bias=False)
        frequencies = 10000.0 ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = torch.arange(shape.seq)[:, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [b, s, h] -> [b, s, h]"""
        y = self.norm1(x)
        q, k, v = (
            project(y).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
            for project in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def turn(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * self.cos - second * self.sin, second * self.cos + first * self.sin), dim=-1)


class Llama(nn.Module):
    """Tokens [b, s] -> logits [b, s, V]. A stage of a pipeline has None for the ends that are not its own."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding: nn.Embedding | None = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm: nn.RMSNorm | None = nn.RMSNorm(shape.hidden)
        self.head: nn.Linear | None = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        if self.head is None or self.norm is None:
            return x
        return self.head(self.norm(x))

    def stage(self, number: int, count: int) -> Llama:
        """One of `count` stages with equally many layers. Shares the parameters."""
        part = Llama.__new__(Llama)
        nn.Module.__init__(part)
        each = len(self.layers) // count
        part.layers = self.layers[number * each : (number + 1) * each]
        part.embedding = self.embedding if number == 0 else None
        part.norm, part.head = (self.norm, self.head) if number == count - 1 else (None, None)
        return part
