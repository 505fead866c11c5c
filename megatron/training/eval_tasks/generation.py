"""Greedy continuations of prompts by forward passes over whole texts, which every layout can compute."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.tokenizers import Tokenizer
from megatron.training.eval_tasks.tokens import prefix_token

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
    def of(cls, options: Mapping[str, Any], default_until: str) -> Limits:
        """From generation_kwargs of lm-evaluation-harness."""
        until = options.get("until", [default_until])
        names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
        given = [options[name] for name in names if options.get(name) is not None]
        listed = [until] if isinstance(until, str) else list(until or [])
        return cls(tuple(each for each in listed if each), int(given[0]) if given else MOST_TOKENS)

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


def continue_prompts(
    prompts: Sequence[Sequence[int]],
    limits: Sequence[Limits],
    tokenizer: Tokenizer,
    next_tokens: Continue,
) -> list[str]:
    """The most likely continuation of each prompt, until one of its strings, an end-of-document token, or its number
    of tokens."""
    ends: Collection[int] = {token for token in (tokenizer.eod, tokenizer.eos) if token is not None}
    new: list[list[int]] = [[] for _ in prompts]
    is_open = [limit.max_tokens > 0 for limit in limits]
    while any(is_open):
        numbers = [number for number, each in enumerate(is_open) if each]
        for number, token in zip(
            numbers, next_tokens([[*prompts[number], *new[number]] for number in numbers]), strict=True
        ):
            if token in ends:
                is_open[number] = False
                continue
            new[number].append(token)
            ended = limits[number].reached(tokenizer.detokenize(new[number]))
            is_open[number] = not ended and len(new[number]) < limits[number].max_tokens
    return [limit.cut(tokenizer.detokenize(tokens)) for limit, tokens in zip(limits, new, strict=True)]
