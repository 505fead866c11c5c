"""The end of greedy continuations, and continuations computed by forward passes over whole texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.tokenizers import Tokenizer
from megatron.extensions.evaluation.rows import prefix_token

MOST_TOKENS = 256
"""lm-evaluation-harness' default of max_gen_toks."""

Continue = Callable[[Sequence[Sequence[int]]], list[int]]
"""Texts in tokens -> the next token of each."""


@dataclass(frozen=True)
class Limits:
    """Where a continuation ends."""

    until: tuple[str, ...]
    """Strings before which a text is cut."""

    max_tokens: int

    @classmethod
    def of(cls, options: Mapping[str, Any], default_until: str, most_tokens: int = MOST_TOKENS) -> Limits:
        """From generation_kwargs of lm-evaluation-harness."""
        until = options.get("until", [default_until])
        names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
        given = [options[name] for name in names if options.get(name) is not None]
        listed = [until] if isinstance(until, str) else list(until or [])
        return cls(tuple(each for each in listed if each), int(given[0]) if given else most_tokens)

    def cut(self, text: str) -> str:
        """Up to the first of the strings."""
        for each in self.until:
            text = text.partition(each)[0]
        return text

    def reached(self, text: str) -> bool:
        return any(each in text for each in self.until)


def prompt_tokens(tokenizer: Tokenizer, text: str, limits: Limits, longest: int) -> tuple[list[int], int]:
    """(tokens of a prompt that leave room for the continuation, tokens cut on the left). An empty prompt begins a
    document. Raises ValueError if there is no room."""
    room = longest - limits.max_tokens
    if room < 1:
        raise ValueError(
            f"max_gen_toks {limits.max_tokens} leaves no room for a prompt in the {longest} tokens that the model reads"
        )
    tokens = tokenizer.tokenize(text) or [prefix_token(tokenizer)]
    return tokens[-room:], max(0, len(tokens) - room)


def eos_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens by which the model ends a text."""
    return frozenset(token for token in (tokenizer.eod, tokenizer.eos) if token is not None)


def continue_prompts(
    prompts: Sequence[Sequence[int]], limits: Sequence[Limits], tokenizer: Tokenizer, next_tokens: Continue
) -> list[str]:
    """The most likely continuation of each prompt, until one of its strings, an end-of-document token, or its number
    of tokens. All texts grow together, by one forward pass over each for each token: any layout can compute that."""
    ends = eos_ids(tokenizer)
    new: list[list[int]] = [[] for _ in prompts]
    growing = [number for number, limit in enumerate(limits) if limit.max_tokens > 0]
    while growing:
        texts = [[*prompts[number], *new[number]] for number in growing]
        still = []
        for number, token in zip(growing, next_tokens(texts), strict=True):
            if token in ends:
                continue
            new[number].append(token)
            ended = limits[number].reached(tokenizer.detokenize(new[number]))
            if not ended and len(new[number]) < limits[number].max_tokens:
                still.append(number)
        growing = still
    return [limit.cut(tokenizer.detokenize(tokens)) for limit, tokens in zip(limits, new, strict=True)]
