"""What one layer of a model consists of, and in what it differs from others. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Which earlier tokens of its document a token attends to, itself included. All of them by default."""

    window: int | None = None
    """Only this number of the last tokens."""

    chunk: int | None = None
    """Only those of its own chunk: documents are cut into chunks of this many tokens (Llama 4)."""

    def mean(self, length: int) -> float:
        """Mean number of tokens that a token of a document of `length` tokens attends to: s/2 by the convention for
        causal attention, less in a window (w - w^2 / 2s) or in chunks."""
        if self.chunk is not None and self.chunk < length:
            whole, rest = divmod(length, self.chunk)
            return (whole * self.chunk**2 + rest**2) / (2 * length)
        w = min(self.window or length, length)
        return w * (1 - w / (2 * length))

    def hides(self, length: int) -> bool:
        """Whether some token does not see all earlier ones of a document of `length` tokens."""
        return any(limit is not None and limit < length for limit in (self.window, self.chunk))


@dataclass(frozen=True)
class Rotation:
    """A rotary embedding of the model."""

    base: float
    scaled: bool = True
    """Whether the model's scaling of frequencies and interpolation of positions apply."""

    percent: float = 1.0
    """Fraction of each head's channels that are rotated."""


@dataclass(frozen=True)
class Sublayers:
    """A layer's parts: something that mixes tokens, something that mixes channels, or both in this order."""

    attends: bool = False
    """Whether it has the model's attention."""

    linear: str | None = None
    """Name of its mixer, in place of the module of the model's attention."""

    mlp: bool = False
    """Whether it has an MLP, dense or of experts."""

    experts: bool = False
    """Whether its MLP is a mixture of experts."""

    @property
    def mixes(self) -> bool:
        """Whether it mixes tokens."""
        return self.attends or self.linear is not None


@dataclass(frozen=True)
class LayerKind(Sublayers):
    """Properties in which the layers of a model may differ."""

    span: Span = Span()
    """Tokens that its attention sees, if it has the model's."""

    rotation: Rotation | None = None
    """The rotary embedding of its queries and keys; None for none, as in layers without the model's attention."""

    own: tuple[tuple[str, object], ...] = ()
    """Fields of the configuration that have another value in this layer than in the model, each with that value."""

    tempered: bool = False
    """Whether its queries are scaled by their positions (--attention-temperature-coeff)."""
