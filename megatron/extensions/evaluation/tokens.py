"""Rows of tokens that a model is run on, from contexts and continuations. No torch.

A row is what the model reads, and the labels are the tokens that follow each; log-likelihoods are of the last
`scored` of them. As in lm-evaluation-harness, what is too long is cut on the left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.core.tokenizers import Tokenizer


@dataclass(frozen=True)
class Row:
    """One sequence of a forward pass."""

    tokens: tuple[int, ...]
    """The tokens that are read, and the one behind them."""

    scored: int
    """So many of the last tokens have their log-likelihoods summed."""

    @property
    def length(self) -> int:
        """Tokens that are read."""
        return len(self.tokens) - 1


def prefix_token(tokenizer: Tokenizer) -> int:
    """The token before a text without context. Raises ValueError if the tokenizer has none."""
    for token in (tokenizer.bos, tokenizer.eos, tokenizer.eod):
        if token is not None:
            return token
    raise ValueError("--eval-tasks: the tokenizer has no token that begins or ends a document; use another one")


def continuation_row(tokenizer: Tokenizer, context: str, continuation: str, longest: int) -> tuple[Row, int]:
    """(row of a continuation, tokens that were cut). Spaces at the end of the context are taken as its continuation's
    first, which is how they are tokenized. ValueError for a continuation without tokens, or longer than `longest`."""
    if context:
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        before, whole = tokenizer.tokenize(context), tokenizer.tokenize(context + continuation)
        after = whole[len(before) :]
    else:
        before, after = [prefix_token(tokenizer)], tokenizer.tokenize(continuation)
        after = after[1:] if after[:1] == before else after
    if not before:
        before = [prefix_token(tokenizer)]
    if not after:
        raise ValueError(f"the continuation {continuation!r} adds no token to its context")
    if len(after) > longest:
        raise ValueError(f"a continuation of {len(after)} tokens is longer than the {longest} that the model reads")
    tokens = [*before, *after]
    return Row(tuple(tokens[-(longest + 1) :]), len(after)), max(0, len(tokens) - longest - 1)


def rolling_rows(tokenizer: Tokenizer, text: str, longest: int) -> Iterator[Row]:
    """Rows that score each token of a text once: the first begins with the prefix token, each further one with the last
    token of the one before, and the last reaches back to be full, so that it has context."""
    tokens: Sequence[int] = [prefix_token(tokenizer), *tokenizer.tokenize(text)]
    for start in range(0, len(tokens) - 1, longest):
        end = min(start + longest, len(tokens) - 1)
        yield Row(tuple(tokens[max(0, end - longest) : end + 1]), end - start)
