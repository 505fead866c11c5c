"""Text from a model: one token after the other, with cached keys and values."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.attention.kv_cache import KeyValueCache
from megatron.core.batch import Batch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.seeds import site_key


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from its logits. Limits apply one after the other, top_k first."""

    temperature: float = 0.0
    """Logits are divided by it; 0 takes the most likely token."""

    top_k: int | None = None
    """Only this many of the most likely tokens."""

    top_p: float | None = None
    """Only the most likely tokens, as few as have this probability together (arXiv:1904.09751)."""

    def __post_init__(self) -> None:
        problems = []
        if self.temperature < 0:
            problems.append(f"--temperature {self.temperature} must not be negative; 0 takes the most likely token")
        if self.top_k is not None and self.top_k < 1:
            problems.append(f"--top-k {self.top_k} must be at least 1; leave it out for no limit")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            problems.append(f"--top-p {self.top_p} must be above 0 and at most 1; leave it out for no limit")
        if problems:
            raise ValueError("\n".join(problems))

    def next_tokens(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """logits [b, vocab], uniform [b] random numbers in [0, 1) -> tokens [b]"""
        if self.temperature == 0:
            return logits.argmax(-1)
        values, tokens = (logits.double() / self.temperature).sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            values, tokens = values[:, : self.top_k], tokens[:, : self.top_k]
        probabilities = values.softmax(-1)
        if self.top_p is not None:
            before = probabilities.cumsum(-1) - probabilities
            probabilities = probabilities.masked_fill(before >= self.top_p, 0.0)
        cumulative = probabilities.cumsum(-1)
        drawn = uniform.to(cumulative)[:, None] * cumulative[:, -1:]
        choice = torch.searchsorted(cumulative, drawn, right=True)
        last = (probabilities > 0).sum(-1, keepdim=True) - 1  # rounding must not choose an excluded token
        return tokens.gather(1, torch.minimum(choice, last)).squeeze(1)


@torch.inference_mode()
def generate(
    model: GPTModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    *,
    seed: int = 1234,
    first: int = 0,
    stop: Collection[int] = (),
) -> list[list[int]]:
    """Continues each prompt, until a token of `stop` (not returned), `max_new_tokens`, or the longest text that the
    model can be run on. Returns the new tokens.

    What a prompt gets depends on the seed, on the prompt and on its number, `first` for the first of them, but not on
    the other prompts.
    Raises ValueError for a prompt that is empty or leaves no room for a token.
    """
    sampling = sampling or Sampling()
    _check_prompts(prompts, model.config.max_positions)
    device = next(model.parameters()).device
    generators = [torch.Generator().manual_seed(site_key(seed, f"prompt {first + i}")) for i in range(len(prompts))]
    budgets = [min(max_new_tokens, model.config.max_positions - len(prompt)) for prompt in prompts]
    new: list[list[int]] = [[] for _ in prompts]
    text = _Text(prompts, device)
    cache = KeyValueCache(text.length + max(budgets, default=0))
    open_rows = {row for row, budget in enumerate(budgets) if budget > 0}
    while open_rows:
        logits = model.logits(None, text.batch(), cache)[:, -1]
        uniform = torch.tensor([torch.rand((), generator=g, dtype=torch.float64) for g in generators])
        tokens = sampling.next_tokens(logits, uniform)
        for row, token in enumerate(tokens.tolist()):
            if row in open_rows and token not in stop:
                new[row].append(token)
            if token in stop or len(new[row]) >= budgets[row]:
                open_rows.discard(row)
        text.append(tokens, model.config.max_positions)
    return new


def _check_prompts(prompts: Sequence[Sequence[int]], longest: int) -> None:
    problems = []
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            problems.append(f"prompt {number} has no tokens: a model needs at least one to continue")
        if len(prompt) >= longest:
            problems.append(
                f"prompt {number} has {len(prompt)} tokens, and the model reads at most {longest} "
                f"(--max-position-embeddings): shorten it to {longest - 1} or fewer"
            )
    if problems:
        raise ValueError("\n".join(problems))


class _Text:
    """The tokens that the model is to read next, in rows of one length.

    Shorter prompts are filled up on the left. The filling is a document of its own, so no text sees it, and positions
    count from each prompt's first token.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], device: torch.device) -> None:
        self.length = max((len(prompt) for prompt in prompts), default=0)
        filling = torch.tensor([self.length - len(prompt) for prompt in prompts], device=device)[:, None]
        rows = [[prompt[0]] * (self.length - len(prompt)) + list(prompt) for prompt in prompts]
        place = torch.arange(self.length, device=device)[None]
        self.tokens = torch.tensor(rows, dtype=torch.int64, device=device)
        self.positions = (place - filling).clamp_(min=0)
        self.documents = (place >= filling).long() if filling.any() else None

    def append(self, tokens: Tensor, longest: int) -> None:
        """Only `tokens` [b] are new. Rows that have ended go on unseen, at the last position there is."""
        self.tokens = tokens[:, None]
        self.positions = (self.positions[:, -1:] + 1).clamp_(max=longest - 1)
        if self.documents is not None:
            self.documents = torch.ones_like(self.tokens)

    def batch(self) -> Batch:
        """Labels and loss mask are of no meaning here."""
        nothing = torch.zeros_like(self.tokens)
        return Batch(self.tokens, nothing, nothing, nothing[:, 0], self.positions, self.documents)
