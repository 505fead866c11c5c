"""What is asked of generation for one text. No model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.extensions.inference.generation.sampling import Sampling

MOST_LOGPROBS = 100


@dataclass(frozen=True)
class Request:
    """One text to be continued. Raises ValueError, with every problem, if a field is not legal by itself."""

    prompt: Sequence[int]
    """Token ids, at least one."""

    max_new_tokens: int = 64
    """At most so many; the longest text that the model can be run on is a limit too."""

    sampling: Sampling = field(default_factory=Sampling)

    seed: int = 1234
    """The new text depends on it, on the prompt and on the sampling, and on nothing else."""

    stop: tuple[str, ...] = ()
    """Texts that end the new text. It does not include them."""

    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the new text. It does not include them."""

    eos_ids: frozenset[int] = frozenset()
    """The same, for tokens by which the model itself ends a text."""

    logprobs: int | None = None
    """Log-probabilities of the new tokens, and of so many most likely ones in their places, before sampling changes
    them."""

    prompt_logprobs: bool = False
    """The same of the prompt's tokens, all but the first."""

    def __post_init__(self) -> None:
        problems = []
        if not self.prompt:
            problems.append("has no tokens: a model needs at least one to continue")
        if self.max_new_tokens < 0:
            problems.append(f"max_new_tokens {self.max_new_tokens} must not be negative")
        if any(not text for text in self.stop):
            problems.append("a stop string must not be empty: it would end every text at its start")
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            problems.append(f"logprobs {self.logprobs} must be from 0 to {MOST_LOGPROBS}")
        if self.prompt_logprobs and self.logprobs is None:
            problems.append("prompt_logprobs needs logprobs")
        if problems:
            raise ValueError("\n".join(problems))


def too_long(prompt_tokens: int, longest: int) -> str | None:
    """What is wrong with a prompt that leaves no room for a new token; None if it does."""
    if prompt_tokens < longest:
        return None
    return (
        f"has {prompt_tokens} tokens, and the model reads at most {longest} "
        f"(--max-position-embeddings): shorten it to {longest - 1} or fewer"
    )


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a token of a text."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens in its place, best first, with theirs."""
