"""Create rows of tokens from contexts and continuations, and divide the rows into batches. This module does not import
torch.

A row is a sequence of input tokens for the model. The label of a token is the next token. Log-likelihoods are computed
for the last `scored` labels. As in lm-evaluation-harness, long rows are truncated on the left. Batches contain rows of
similar length and are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil

from megatron.core.tokenizers import Tokenizer, tokenize_beginning

SHORTEST = 16
"""Minimum row length of a batch."""

ROUND = 16
"""Number of micro-batches that each model replica runs in one round. A round is one run of the pipeline."""


@dataclass(frozen=True)
class Row:
    """Token sequence that the model processes."""

    tokens: tuple[int, ...]
    """Input tokens, followed by the label of the last input token."""

    scored: int
    """Number of tokens at the end of the row whose log-likelihoods are summed."""

    @property
    def length(self) -> int:
        """Number of input tokens."""
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Score:
    """Scores that the model assigns to one row."""

    log_likelihood: float
    """Log-likelihood of the scored tokens, in nats."""

    is_greedy: bool
    """True if each scored token is the most likely one."""

    next_token: int
    """Most likely token after the input tokens."""


def prefix_token(tokenizer: Tokenizer) -> int:
    """Return the token to put before a text without context: the first of BOS, EOS and EOD that the tokenizer has.
    Raises ValueError if the tokenizer has none of them."""
    for token in (tokenizer.bos, tokenizer.eos, tokenizer.eod):
        if token is not None:
            return token
    rule = "the tokenizer has no token that begins or ends a document"
    raise ValueError(f"--eval-tasks: {rule}; use a different tokenizer")


def continuation_row(tokenizer: Tokenizer, context: str, continuation: str, longest: int) -> tuple[Row, int]:
    """Return the token row that scores a continuation, and the number of context tokens that were truncated. Spaces at
    the end of the context are moved to the start of the continuation, because tokenizers usually join a space and the
    following word.

    Args:
        tokenizer: Tokenizer of the model.
        context: Text before the continuation.
        continuation: Text to score.
        longest: Maximum row length.

    Raises:
        ValueError: The continuation adds no token to the context, or is longer than `longest` tokens.
    """
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
    """Split a text into rows, such that each token of the text is scored exactly once.

    The first row starts with the prefix token. Each later row starts with the last token of the previous row. The last
    row is extended to the left until it has `longest` tokens, so that its scored tokens have more context.
    """
    tokens: Sequence[int] = [prefix_token(tokenizer), *tokenize_beginning(tokenizer, text)]
    for start in range(0, len(tokens) - 1, longest):
        end = min(start + longest, len(tokens) - 1)
        yield Row(tuple(tokens[max(0, end - longest) : end + 1]), end - start)


@dataclass(frozen=True)
class Round:
    """One run of the pipeline: the micro-batches of each model replica, all of the same shape."""

    length: int
    """Number of tokens per row. Shorter rows are padded on the right."""

    size: int
    """Number of rows per micro-batch."""

    microbatches: tuple[tuple[tuple[int, ...], ...], ...]
    """Numbers of the rows in each micro-batch, indexed as [replica][micro-batch]. In the last round with the same
    `length`, a micro-batch may contain fewer than `size` rows, or no rows."""


def batch_lengths(longest: int, divisor: int) -> tuple[int, ...]:
    """Return the permitted batch lengths in ascending order: `longest`, half of it, a quarter of it, and so on. All
    lengths are multiples of `divisor` and at least `SHORTEST`.

    With few permitted lengths, kernels are compiled for few shapes.
    """
    found = [longest]
    while found[-1] % (2 * divisor) == 0 and found[-1] // 2 >= SHORTEST:
        found.append(found[-1] // 2)
    return tuple(reversed(found))


def plan_rounds(
    lengths: Sequence[int], allowed: Sequence[int], budget: int, replicas: int, per_round: int = ROUND
) -> Iterator[Round]:
    """Group rows of similar length into batches, and yield rounds of batches. Rounds with the longest rows come first.

    Args:
        lengths: Length of each row.
        allowed: Permitted batch lengths.
        budget: Maximum number of tokens per batch. A batch with a single row may exceed this maximum.
        replicas: Number of model replicas. Batches are distributed round-robin over the replicas.
        per_round: Number of micro-batches per replica in one round.
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])

    def padded(number: int) -> int:
        return next(length for length in allowed if length >= lengths[number])

    for length, group in groupby(order, key=padded):
        rows = list(group)
        few = 1 << (ceil(len(rows) / replicas) - 1).bit_length()  # rounded up, to limit the number of shapes
        size = min(max(1, budget // length), few)
        batches = [tuple(rows[start : start + size]) for start in range(0, len(rows), size)]
        batches += [()] * (-len(batches) % replicas)
        dealt = [batches[replica::replicas] for replica in range(replicas)]
        for start in range(0, len(dealt[0]), per_round):
            yield Round(length, size, tuple(tuple(each[start : start + per_round]) for each in dealt))
