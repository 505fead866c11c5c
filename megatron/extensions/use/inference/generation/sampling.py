"""Sampling of the next token from the model's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TEMPERATURES = 1e-6, 1e6
"""Minimum and maximum of --temperature. The temperature may also be 0."""

PENALTIES = 1e-3, 1e3
"""Minimum and maximum of --repetition-penalty."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Repetition penalty, temperature, top_k, top_p and min_p are applied in this order."""

    temperature: float = 0.0
    """Divisor of the logits. If the temperature is 0, the most likely token is chosen."""

    top_k: int | None = None
    """Number of most likely tokens from which the next token is sampled. If None, the next token is sampled from all
    tokens."""

    top_p: float | None = None
    """Minimum total probability of the tokens from which the next token is sampled. The smallest set of most likely
    tokens that reaches this probability is used (arXiv:1904.09751)."""

    min_p: float | None = None
    """Minimum probability of the tokens from which the next token is sampled, as a fraction of the probability of the
    most likely token (arXiv:2407.01082)."""

    repetition_penalty: float = 1.0
    """Penalty for tokens that already occur in the prompt or in the new text. Positive logits of these tokens are
    divided by the penalty, and negative logits are multiplied by the penalty (CTRL, arXiv:1909.05858, section 4.1)."""

    def __post_init__(self) -> None:
        problems = []
        if not (self.temperature == 0 or TEMPERATURES[0] <= self.temperature <= TEMPERATURES[1]):
            rule = f"must be 0 or from {TEMPERATURES[0]:g} to {TEMPERATURES[1]:,.0f}"
            problems.append(f"--temperature {self.temperature} {rule}; 0 selects the most likely token")
        if self.top_k is not None and self.top_k < 1:
            problems.append(f"--top-k {self.top_k} must be at least 1; leave it out for no limit")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            problems.append(f"--top-p {self.top_p} must be above 0 and at most 1; leave it out for no limit")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            problems.append(f"--min-p {self.min_p} must be from 0 to 1; leave it out for no limit")
        if not PENALTIES[0] <= self.repetition_penalty <= PENALTIES[1]:
            rule = f"must be from {PENALTIES[0]:g} to {PENALTIES[1]:,.0f}"
            problems.append(f"--repetition-penalty {self.repetition_penalty} {rule}; 1 applies no penalty")
        if problems:
            raise ValueError("\n".join(problems))

    def next_tokens(self, logits: Tensor, uniform: Tensor, earlier: Sequence[Sequence[int]] = ()) -> Tensor:
        """Sample the next token of each sequence, and return the token ids [b].

        If the largest logit is not finite, the result is an arbitrary token of the vocabulary.

        Args:
            logits: Logits [b, vocab].
            uniform: Random numbers [b] in [0, 1).
            earlier: Earlier tokens of each sequence, to which the repetition penalty applies.
        """
        if self.repetition_penalty != 1:
            logits = self._penalized(logits, earlier)
        if self.temperature == 0:
            return logits.argmax(-1)
        wide = logits.double()
        # Subtracting the maximum prevents overflow if the temperature is near 0.
        wide = wide - wide.amax(-1, keepdim=True)
        values, tokens = (wide / self.temperature).sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            kept = min(self.top_k, values.shape[-1])
            values, tokens = values[:, :kept], tokens[:, :kept]
        probabilities = values.softmax(-1)
        if self.min_p is not None:
            unlikely = probabilities < self.min_p * probabilities[:, :1]
        if self.top_p is not None:
            before = probabilities.cumsum(-1) - probabilities
            probabilities = probabilities.masked_fill(before >= self.top_p, 0.0)
        if self.min_p is not None:
            probabilities = probabilities.masked_fill(unlikely, 0.0)
        cumulative = probabilities.cumsum(-1)
        drawn = uniform.to(cumulative)[:, None] * cumulative[:, -1:]
        choice = torch.searchsorted(cumulative, drawn, right=True)
        # `last` is the index of the last token that is not excluded. `last` limits the choice, because rounding could
        # select an excluded token after `last`. If the probabilities are NaN, `last` is -1, and the choice becomes 0.
        last = (probabilities > 0).sum(-1, keepdim=True) - 1
        return tokens.gather(1, torch.minimum(choice, last).clamp(min=0)).squeeze(1)

    def _penalized(self, logits: Tensor, earlier: Sequence[Sequence[int]]) -> Tensor:
        # In a smaller dtype, the product of a logit and the penalty could overflow.
        logits = logits.to(torch.float64, copy=True)
        for row, text in zip(logits, earlier, strict=True):
            tokens = torch.tensor(sorted(set(text)), device=row.device)
            values = row[tokens]
            row[tokens] = torch.where(values > 0, values / self.repetition_penalty, values * self.repetition_penalty)
        return logits
