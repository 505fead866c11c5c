"""Piecewise learning rate schedules. Each piece has a shape and a length: `warm-up 1%, hold rest, 1-sqrt 20%`. This
module does not import torch.

Lengths are in samples, in tokens, or in percent of the schedule. A schedule therefore does not depend on batch size
ramp-ups or on resumes. Learning rates are multiples of the peak learning rate, --lr.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda ratio: 1.0 - ratio,
    "cosine": lambda ratio: 0.5 * (math.cos(math.pi * ratio) + 1.0),
    "sqrt": lambda ratio: math.sqrt(1.0 - ratio),
    "1-sqrt": lambda ratio: 1.0 - math.sqrt(ratio),
}
"""Decay functions, keyed by the name of the shape. The argument of a function is the elapsed fraction of the piece, and
the result is the remaining fraction of the change in learning rate. The shape 1-sqrt comes from arXiv 2405.18392."""

SHAPES = ("warm-up", "hold", *DECAYS, "power")
REST = "rest"
UNITS = ("%", "samples", "tokens")
SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
EXAMPLE = "for example `warm-up 1%, hold rest, 1-sqrt 20%`"

LENGTH = re.compile(rf"([0-9.]+(?:e[0-9]+)?)([KMBT]?)\s*({'|'.join(UNITS)})|{REST}")


@dataclass(frozen=True)
class Length:
    """Length of a piece of a learning rate schedule: a number of samples or tokens, a percentage of the schedule, or
    the rest of the schedule."""

    amount: float
    unit: str

    def __str__(self) -> str:
        return self.unit if self.unit == REST else f"{_text(self.amount)}{' ' if self.unit != '%' else ''}{self.unit}"

    def in_samples(self, total: float) -> float:
        """Convert the length to samples, for a schedule of `total` samples. Lengths in tokens must be converted by
        `without_tokens` first."""
        assert self.unit in ("%", "samples"), self.unit
        return self.amount if self.unit == "samples" else self.amount / 100 * total


def _text(value: float) -> str:
    """Format a number. Whole numbers have no decimal point."""
    return str(int(value)) if value.is_integer() else repr(value)


@dataclass(frozen=True)
class Piece:
    """Piece of a learning rate schedule."""

    shape: str
    length: Length
    to: float | None = None
    """Learning rate at the end of the piece, as a multiple of the peak learning rate. If `to` is None, a warm-up ends
    at the peak, and a decay ends at --min-lr."""

    exponent: float | None = None
    """Exponent e of the shape "power", whose learning rate is proportional to n^e after n consumed samples; None for
    other shapes."""

    after: Length | None = None
    """For the shape "power", the length of training after which the power law begins. Before this point, the learning
    rate is constant. If `after` is None, the power law begins at the start of the piece."""

    def __str__(self) -> str:
        words = [self.shape, str(self.length)]
        words += [] if self.to is None else [f"to {_text(self.to)}"]
        words += [] if self.exponent is None else [f"exponent {_text(self.exponent)}"]
        return " ".join([*words, *([] if self.after is None else [f"after {self.after}"])])


@lru_cache(maxsize=64)
def parse(text: str) -> tuple[Piece, ...]:
    """Parse the pieces of a schedule, which are separated by commas or line ends. A # starts a comment. Raise
    ValueError if the text is not a valid schedule."""
    lines = [line.partition("#")[0] for line in text.splitlines()]
    pieces = tuple(_piece(" ".join(each.split())) for line in lines for each in line.split(",") if each.strip())
    if not pieces:
        raise ValueError(f"contains no piece; write at least one, {EXAMPLE}")
    if sum(piece.length.unit == REST for piece in pieces) > 1:
        raise ValueError(f"has more than one piece with the length `{REST}`; give the others a length")
    return pieces


def _piece(text: str) -> Piece:
    shape, _, rest = text.partition(" ")
    if shape not in SHAPES:
        raise ValueError(f"`{text}` has no shape; begin it with one of {', '.join(SHAPES)}")
    found = LENGTH.match(rest)
    if found is None:
        raise ValueError(f"`{text}` has no length; write for example 20%, 5e6 samples, 2B tokens or {REST}")
    words: dict[str, str] = {}
    for more in re.finditer(r"(\S+)\s+([^a-z\s]\S*(?:\s+(?:samples|tokens))?)\s*|\S+", rest[found.end() :].strip()):
        if more[1] not in ("to", "exponent", "after") or more[1] in words:
            raise ValueError(
                f"`{text}` has `{more[0].strip()}` after its length; only to, exponent and after are allowed"
            )
        words[more[1]] = more[2]
    piece = Piece(shape, _length(found), _number(text, words, "to"), _number(text, words, "exponent"))
    if "after" in words:
        if (after := LENGTH.fullmatch(words["after"])) is None:
            raise ValueError(f"`{text}`: after needs a length such as 5% or 1B tokens")
        piece = replace(piece, after=_length(after))
    _check(text, piece)
    return piece


def _length(found: re.Match[str]) -> Length:
    if found[0] == REST:
        return Length(0.0, REST)
    try:
        return Length(float(found[1]) * SUFFIXES[found[2]], found[3])
    except ValueError:
        raise ValueError(f"`{found[0]}` is not a length; write for example 20%, 5e6 samples or 2B tokens") from None


def _number(text: str, words: dict[str, str], key: str) -> float | None:
    try:
        return float(words[key]) if key in words else None
    except ValueError:
        raise ValueError(f"`{text}`: {key} {words[key]} is not a number; correct it") from None


def _check(text: str, piece: Piece) -> None:
    power = piece.shape == "power"
    if piece.length.unit == "%" and piece.length.amount > 100:
        raise ValueError(f"`{text}` is longer than 100%; use at most 100%")
    if piece.to is not None and not 0 <= piece.to < math.inf:
        raise ValueError(f"`{text}`: `to` must be at least 0, because it is a factor of --lr; write for example to 0.1")
    if piece.to is not None and (power or piece.shape == "hold"):
        raise ValueError(f"`{text}`: {piece.shape} does not accept `to`; remove it")
    if power != (piece.exponent is not None) or (piece.exponent or -1.0) >= 0:
        raise ValueError(
            f"`{text}`: power needs an exponent below 0, and other shapes accept none; for example exponent -0.51"
        )
    if piece.after is not None and not power:
        raise ValueError(f"`{text}`: {piece.shape} does not accept `after`; remove it")


def without_tokens(text: str, seq_length: int) -> str:
    """Convert all lengths in tokens to lengths in samples in the text of a schedule. Each sample has `seq_length`
    tokens. Raise ValueError in the same cases as `parse`."""

    def converted(length: Length) -> Length:
        return Length(length.amount / seq_length, "samples") if length.unit == "tokens" else length

    def of(piece: Piece) -> Piece:
        after = piece.after and converted(piece.after)
        return replace(piece, length=converted(piece.length), after=after)

    return ", ".join(str(of(piece)) for piece in parse(text))


def lengths(pieces: Sequence[Piece], total: float) -> list[float]:
    """Return the length of each piece in samples, for a schedule of `total` samples. Raise ValueError if the sum of the
    lengths is larger than `total`."""
    fixed = sum(piece.length.in_samples(total) for piece in pieces if piece.length.unit != REST)
    if fixed > total * (1 + 1e-9):
        raise ValueError(f"its pieces have {fixed:g} samples, but the schedule has only {total:g}; shorten some")
    left = max(0.0, total - fixed)
    return [left if piece.length.unit == REST else piece.length.in_samples(total) for piece in pieces]


@dataclass(frozen=True)
class Rates:
    """Learning rates that a schedule refers to: the initial, the peak and the lowest learning rate."""

    first: float
    """Learning rate at the start of the first piece if this piece is a warm-up."""

    peak: float
    lowest: float
    """Learning rate at the end of a decay whose text does not specify `to`."""


def rate_at(pieces: Sequence[Piece], samples: float, total: float, rates: Rates) -> float:
    """Return the learning rate after a number of consumed samples. After the last piece, the rate stays constant.

    Args:
        pieces: Pieces of the schedule.
        samples: Number of consumed samples.
        total: Length of the schedule in samples.
        rates: Initial, peak and lowest learning rate.
    """
    begin, rate = 0.0, rates.peak if pieces[0].shape != "warm-up" else rates.first
    for piece, length in zip(pieces, lengths(pieces, total), strict=True):
        inside = samples - begin < length
        rate = _after(piece, rate, (begin, min(samples - begin, length), length), total, rates)
        if inside:
            break
        begin += length
    return rate


def _after(piece: Piece, rate: float, place: tuple[float, float, float], total: float, rates: Rates) -> float:
    """Return the learning rate at a position within a piece. `rate` is the learning rate at the start of the piece.
    `place` contains three numbers of samples: the samples before the piece, the samples from the start of the piece to
    the position, and the samples in the whole piece.
    """
    begin, here, length = place
    ratio = here / length if length > 0 else 1.0
    if piece.shape == "hold":
        return rate
    if piece.shape == "power":
        knee = begin if piece.after is None else piece.after.in_samples(total)
        assert piece.exponent is not None
        return rate * min(1.0, (max(begin + here, 1.0) / max(knee, 1.0)) ** piece.exponent)
    if piece.shape == "warm-up":
        return rate + ((rates.peak if piece.to is None else piece.to * rates.peak) - rate) * ratio
    end = rates.lowest if piece.to is None else piece.to * rates.peak
    return end + DECAYS[piece.shape](ratio) * (rate - end)


def absolute(text: str) -> Iterator[str]:
    """Yield the text of each piece that contains a length in samples or tokens. Unlike percentages, these lengths do
    not scale with the length of the schedule."""
    for piece in parse(text):
        if any(length is not None and length.unit in ("samples", "tokens") for length in (piece.length, piece.after)):
            yield str(piece)
