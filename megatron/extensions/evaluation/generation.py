"""Greedy continuations: what a context asks for, where a text ends, and texts computed by passes over all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.core.tokenizers import Tokenizer
from megatron.extensions.evaluation.rows import prefix_token
from megatron.extensions.inference.generation import Request, eos_ids

MOST_TOKENS = 256
"""lm-evaluation-harness' default of max_gen_toks."""


def greedy_request(
    tokenizer: Tokenizer,
    context: str,
    options: Mapping[str, Any],
    default_until: str,
    longest: int,
    most_tokens: int = MOST_TOKENS,
) -> tuple[Request, int]:
    """(the continuation of a context, tokens of it that are cut on the left), by generation_kwargs of
    lm-evaluation-harness. An empty context begins a document. Raises ValueError if there is no room for any of it."""
    names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    new = next((int(options[name]) for name in names if options.get(name) is not None), most_tokens)
    if (room := longest - new) < 1:
        raise ValueError(f"max_gen_toks {new} leaves no room for a prompt in the {longest} tokens that the model reads")
    until = options.get("until", default_until) or []
    stop = tuple(filter(None, [until] if isinstance(until, str) else until))
    tokens = tokenizer.tokenize(context) or [prefix_token(tokenizer)]
    return Request(tokens[-room:], new, stop=stop, eos_ids=eos_ids(tokenizer)), max(0, len(tokens) - room)


def until_stop(text: str, request: Request) -> str:
    """A text up to the first of the strings that end it."""
    for each in request.stop:
        text = text.partition(each)[0]
    return text


def continue_requests(
    requests: Sequence[Request], tokenizer: Tokenizer, next_tokens: Callable[[Sequence[Sequence[int]]], list[int]]
) -> list[str]:
    """The most likely continuation of each prompt, until one of its strings, an end-of-document token, or its number
    of tokens. All texts grow together, by one forward pass over each for each token: any layout can compute that.

    `next_tokens`: texts in tokens -> the next token of each."""
    new: list[list[int]] = [[] for _ in requests]
    growing = [number for number, request in enumerate(requests) if request.max_new_tokens]
    while growing:
        texts = [[*requests[number].prompt, *new[number]] for number in growing]
        still = []
        for number, token in zip(growing, next_tokens(texts), strict=True):
            request = requests[number]
            if token in request.eos_ids:
                continue
            new[number].append(token)
            text = tokenizer.detokenize(new[number])
            if text == until_stop(text, request) and len(new[number]) < request.max_new_tokens:
                still.append(number)
        growing = still
    return [until_stop(tokenizer.detokenize(tokens), each) for each, tokens in zip(requests, new, strict=True)]
