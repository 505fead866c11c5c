"""Models of the speed benchmarks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Style:
    """Sizes of a model that the contestants of all programs can build."""

    layers: int
    hidden: int
    heads: int
    groups: int
    ffn: int
    seq: int
    vocab: int
    micro_batch: int
    llama: bool

    @property
    def tokens(self) -> int:
        """Number of tokens in one step."""
        return self.seq * self.micro_batch

    @property
    def products(self) -> list[tuple[int, int]]:
        """Shape (in, out) of each weight matrix that multiplies activations."""
        head_dim = self.hidden // self.heads
        qkv = (self.heads + 2 * self.groups) * head_dim
        layer = [
            (self.hidden, qkv),
            (self.hidden, self.hidden),
            (self.hidden, self.ffn * (2 if self.llama else 1)),
            (self.ffn, self.hidden),
        ]
        return layer * self.layers + [(self.hidden, self.vocab)]

    @property
    def parameters(self) -> int:
        """Number of parameters of the Llama-style model: matrices, embedding and norms."""
        matrices = sum(size_in * size_out for size_in, size_out in self.products)
        return matrices + self.hidden * (self.vocab + 2 * self.layers + 1)


STYLES = {
    "gpt": Style(6, 384, 6, 6, 4 * 384, 256, 50304, 4, llama=False),
    "llama": Style(6, 384, 6, 2, 1024, 512, 32000, 2, llama=True),
}
