"""Rows of tokens that a model is run on, from contexts and continuations, and batches of them. This module does not
import torch.

A row is what the model reads, and the labels are the tokens that follow each; log-likelihoods are of the last
`scored` of them. As in lm-evaluation-harness, what is too long is cut on the left. Batches are of rows of about one
length, and the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil

from megatron.core.tokenizers import Tokenizer, tokenize_beginning

SHORTEST = 16
"""Batches are not made shorter than this."""

ROUND = 16
"""Micro-batches that go through the pipeline in one run of it, for each of its ranks."""


@dataclass(frozen=True)
class Row:
    """One sequence of a forward pass."""

    tokens: tuple[int, ...]
    """The tokens that are read, and the one after them."""

    scored: int
    """The log-likelihoods of this many tokens at the end are summed."""

    @property
    def length(self) -> int:
        """Tokens that are read."""
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Score:
    """The model's result for a row."""

    log_likelihood: float
    """Log-likelihood of the scored tokens, in nats."""

    is_greedy: bool
    """True if each of them is the most likely one."""

    next_token: int
    """The most likely label of the row's last place."""


def prefix_token(tokenizer: Tokenizer) -> int:
    """The token before a text without context. Raises ValueError if the tokenizer has none."""
    for token in (tokenizer.bos, tokenizer.eos, tokenizer.eod):
        if token is not None:
            return token
    raise ValueError("--eval-tasks: the tokenizer has no token that begins or ends a document; use another one")


def continuation_row(tokenizer: Tokenizer, context: str, continuation: str, longest: int) -> tuple[Row, int]:
    """(row of a continuation, tokens that were cut). Spaces at the end of the context are taken as its continuation's
    first, which is how they are tokenized. Raises ValueError for a continuation without tokens, or longer than
    `longest`."""
    if context:
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        before, whole = (tokenize_beginning(tokenizer, text) for text in (context, context + continuation))
        after = whole[len(before) :]
    else:
        before, after = [prefix_token(tokenizer)], tokenize_beginning(tokenizer, continuation)
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
    tokens: Sequence[int] = [prefix_token(tokenizer), *tokenize_beginning(tokenizer, text)]
    for start in range(0, len(tokens) - 1, longest):
        end = min(start + longest, len(tokens) - 1)
        yield Row(tuple(tokens[max(0, end - longest) : end + 1]), end - start)


@dataclass(frozen=True)
class Round:
    """Micro-batches of one shape, run one after another on each replica of the model."""

    length: int
    """Tokens of a row; shorter rows are padded on the right."""

    size: int
    """Rows of a micro-batch."""

    microbatches: tuple[tuple[tuple[int, ...], ...], ...]
    """[replica][micro-batch]: numbers of its rows; at the end of a plan fewer than `size`, or none."""


def batch_lengths(longest: int, divisor: int) -> tuple[int, ...]:
    """Lengths that batches may have, ascending: `longest` halved as long as `divisor` divides it. Few of them, so that
    compiled kernels see few shapes."""
    found = [longest]
    while found[-1] % (2 * divisor) == 0 and found[-1] // 2 >= SHORTEST:
        found.append(found[-1] // 2)
    return tuple(reversed(found))


def plan_rounds(
    lengths: Sequence[int], allowed: Sequence[int], budget: int, replicas: int, per_round: int = ROUND
) -> Iterator[Round]:
    """Batches of at most `budget` tokens each, or of one row: the longest rows first. Rows of similar length form a
    batch, and the `replicas` receive batches in turn."""
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])

    def padded(number: int) -> int:
        return next(length for length in allowed if length >= lengths[number])

    for length, group in groupby(order, key=padded):
        rows = list(group)
        few = 1 << (ceil(len(rows) / replicas) - 1).bit_length()  # a power of two: where rows are few, few shapes
        size = min(max(1, budget // length), few)
        batches = [tuple(rows[start : start + size]) for start in range(0, len(rows), size)]
        batches += [()] * (-len(batches) % replicas)
        dealt = [batches[replica::replicas] for replica in range(replicas)]
        for start in range(0, len(dealt[0]), per_round):
            yield Round(length, size, tuple(tuple(each[start : start + per_round]) for each in dealt))
