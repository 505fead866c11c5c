"""Explanation of how a wrong gradient differs from the correct one: by a factor, a missing part, swapped blocks and so
on.

Every hypothesis derives a tensor from the correct gradient. A hypothesis holds if the tensor that it derives equals the
wrong gradient within the tolerance. Simple hypotheses are tested before complicated ones, and the first hypothesis that
holds is reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations

import torch
from torch import Tensor

BLOCKS = (2, 3, 4, 8, 16)
"""Numbers of equal blocks into which each dimension of a gradient is divided to find a wrong block."""

MOST_ITEMS = 512
"""Largest size of the first dimension for which each index, such as an expert or a head, is checked separately."""

MOST_RUNS = 4
"""Largest number of separate ranges of wrong rows that a message lists."""

LARGEST_FACTOR = 1024
"""Largest denominator of a factor that is printed as a fraction. A factor such as 1/8 is typical of a program that sums
or averages twice over the same axis."""


UNRELATED = 0.9
"""Relative difference above which a wrong gradient without an explanation counts as unrelated to the correct
gradient."""


@dataclass(frozen=True)
class Verdict:
    """Result of comparing a gradient with the correct gradient."""

    difference: float
    """Relative difference: norm of the difference of two tensors, divided by the larger of the tensors' norms."""

    allowed: float
    cause: str | None = None
    """Explanation of the difference, or None if the difference is at most `allowed`."""

    explained: bool = True
    """True if `cause` names the reason for the difference, False if it only describes the difference."""

    @property
    def equal(self) -> bool:
        return self.difference <= self.allowed

    @property
    def unrelated(self) -> bool:
        """True if the gradient has no similarity with the correct gradient."""
        return not self.equal and not self.explained and self.difference > UNRELATED


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference divided by the larger of the two norms. The result is 0 if both tensors are
    zero, and infinite if a value is not finite."""
    gap = torch.linalg.vector_norm(found - expected).item()
    scale = max(torch.linalg.vector_norm(each).item() for each in (found, expected))
    if gap != gap or scale == float("inf"):
        return float("inf")
    return gap / scale if scale else 0.0


def judge(found: Tensor, expected: Tensor, allowed: float) -> Verdict:
    """Compare a gradient with the correct gradient. Both tensors must have dtype fp64 and the same shape."""
    gap = difference(found, expected)
    if gap <= allowed:
        return Verdict(gap, allowed)
    cause = cause_of(found, expected, allowed)
    return Verdict(gap, allowed, cause or _described(found, expected, allowed), explained=cause is not None)


def cause_of(found: Tensor, expected: Tensor, allowed: float) -> str | None:
    """Return the cause that explains a wrong gradient, or None if no cause is found."""
    if not found.isfinite().all():
        bad = int((~found.isfinite()).sum())
        return f"{bad:,} of {found.numel():,} values are not finite"
    whole = _as_whole(found, expected, allowed)
    if whole is not None:
        return whole
    causes = [(share, f"{where} {cause}") for share, where, cause in _of_parts(found, expected, allowed) if cause]
    return min([*causes, *_of_order(found, expected, allowed)], default=(0.0, None))[1]


def _described(found: Tensor, expected: Tensor, allowed: float) -> str:
    """Describe how a wrong gradient differs from the correct one, if no hypothesis explains the difference."""
    part = min(_of_parts(found, expected, allowed), default=None)
    if part is not None:
        return f"{part[1]} differ"
    similarity = torch.nn.functional.cosine_similarity(found.flatten(), expected.flatten(), dim=0).item()
    if similarity > 0.999:
        return f"nearly proportional (cosine {similarity:.6f}): rounding of a coarser format, or a small term"
    if similarity > 0.1:
        return f"a part of the sum is missing or extra (cosine {similarity:.3f})"
    return f"unrelated (cosine {similarity:.3f})"


def _as_whole(found: Tensor, expected: Tensor, allowed: float) -> str | None:
    """Return a single cause that explains all elements of the wrong gradient, such as a factor, or None if there is no
    such cause."""
    sizes = [torch.linalg.vector_norm(each).item() for each in (found, expected)]
    if sizes[0] <= allowed * sizes[1]:
        return "is zero"
    if sizes[1] <= allowed * sizes[0]:
        return "should be zero"
    factor = (torch.sum(found * expected) / torch.sum(expected * expected)).item()
    if factor and difference(found, factor * expected) <= allowed:
        times = fraction(factor, allowed)
        if found.numel() > 1 or "." not in times:  # a factor explains nothing if the gradient is one number
            return f"is {times} times as large"
    for dims in _transposed(found, expected):
        if difference(found, expected.transpose(*dims)) <= allowed:
            return f"dims {dims[0]} and {dims[1]} are transposed"
    return None


def _transposed(found: Tensor, expected: Tensor) -> Iterator[tuple[int, int]]:
    for first in range(expected.dim()):
        for second in range(first + 1, expected.dim()):
            if expected.shape[first] == expected.shape[second] > 1:
                yield first, second


def fraction(factor: float, allowed: float) -> str:
    """Format a factor as `1/2`, `-3` or `0.4231`. The result is a fraction of small integers if such a fraction is
    within the tolerance."""
    sign, size = "-" if factor < 0 else "", abs(factor)
    if abs(size - 1) <= allowed:
        return f"{sign}1"
    for number in range(2, LARGEST_FACTOR + 1):
        if abs(size - number) <= allowed * number:
            return f"{sign}{number}"
        if abs(size * number - 1) <= allowed:
            return f"{sign}1/{number}"
    return f"{factor:.4g}"


def _of_parts(found: Tensor, expected: Tensor, allowed: float) -> Iterator[tuple[float, str, str]]:
    """Find parts that are wrong in an otherwise correct gradient. Yield (fraction of wrong elements, position,
    cause)."""
    yield from _of_blocks(found, expected, allowed)
    yield from _of_rows(found, expected, allowed)


def _of_rows(found: Tensor, expected: Tensor, allowed: float) -> Iterator[tuple[float, str, str]]:
    """Find ranges of wrong indices along each dimension, such as the rows of keys and values in a QKV weight. A
    dimension with many separate ranges is ignored. Yield (fraction of wrong elements, position, cause)."""
    for dim, size in enumerate(found.shape):
        gaps, *norms = (
            torch.linalg.vector_norm(each.movedim(dim, 0).reshape(size, -1), dim=1)
            for each in (found - expected, found, expected)
        )
        scale = torch.maximum(*norms)
        usual = torch.linalg.vector_norm(scale) / size**0.5
        wrong = gaps > allowed * torch.maximum(scale, usual)
        runs = _runs(wrong.nonzero().flatten().tolist())
        if not 0 < len(runs) <= MOST_RUNS or not (~wrong & (scale > 0)).any():
            continue
        chosen = wrong.nonzero().flatten()
        parts = found.index_select(dim, chosen), expected.index_select(dim, chosen)
        words = " and ".join(f"{start} to {stop - 1}" if stop - start > 1 else str(start) for start, stop in runs)
        rows = "rows" if len(chosen) > 1 else "row"
        yield len(chosen) / size, f"{rows} {words} of {size} of dim {dim}:", _as_whole(*parts, allowed) or ""


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return (start, stop) of each range of consecutive numbers."""
    cuts = [0, *(i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1] + 1), len(numbers)]
    return [(numbers[start], numbers[stop - 1] + 1) for start, stop in pairwise(cuts) if stop > start]


def _of_blocks(found: Tensor, expected: Tensor, allowed: float) -> Iterator[tuple[float, str, str]]:
    """Divide each dimension of a gradient into blocks, in several ways, and find divisions in which only some blocks
    are wrong. Yield (fraction of wrong elements, position, cause) for each such division.

    The cause is "" if the wrong blocks share no simple cause. Blocks of zeros, such as padding, are ignored.
    """
    for dim, size in enumerate(found.shape):
        counts = {count for count in BLOCKS if size % count == 0 and size > count}
        if dim == 0 and 1 < size <= MOST_ITEMS and found.dim() > 1:
            counts.add(size)
        for count in sorted(counts):
            pairs = list(zip(found.chunk(count, dim), expected.chunk(count, dim), strict=True))
            told = [number for number, (one, other) in enumerate(pairs) if one.any() or other.any()]
            wrong = [number for number in told if difference(*pairs[number]) > allowed]
            if 0 < len(wrong) < len(told):
                causes = {_as_whole(*pairs[number], allowed) for number in wrong}
                cause = causes.pop() if len(causes) == 1 else None
                yield len(wrong) / count, _named(wrong, count, dim), cause or ""


def _named(numbers: Sequence[int], count: int, dim: int) -> str:
    shown = ", ".join(map(str, numbers[:4])) + (", ..." if len(numbers) > 4 else "")
    return f"of {count} blocks of dim {dim}, {shown}:" if len(numbers) > 1 else f"block {shown} of {count} of dim {dim}"


def _exchanged(found: Tensor, expected: Tensor, allowed: float, dim: int) -> Iterator[tuple[float, str]]:
    """Find two ranges of rows that are swapped. Both tensors have shape [rows, elements]: dimension `dim` of the
    gradient has been moved to the front, and the others are flattened."""
    apart = torch.linalg.vector_norm(found - expected, dim=1)
    rows = torch.nonzero(apart > allowed * torch.linalg.vector_norm(expected, dim=1)).flatten()
    first, second = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    if len(first) != len(second) or not len(first) or len(rows) == len(found):
        return
    if any(int(each[-1] - each[0]) != len(each) - 1 for each in (first, second)):
        return
    if max(difference(found[first], expected[second]), difference(found[second], expected[first])) <= allowed:
        ends = [(int(each[0]), int(each[-1])) for each in (first, second)]
        shown = [str(low) if low == high else f"{low} to {high}" for low, high in ends]
        yield len(rows) / len(found), f"rows {shown[0]} and {shown[1]} of dim {dim} have changed places"


def _of_order(found: Tensor, expected: Tensor, allowed: float) -> Iterator[tuple[float, str]]:
    """Find blocks of a gradient that have correct values but are in the wrong order."""
    for dim, size in enumerate(found.shape):
        rows, right = (each.movedim(dim, 0).reshape(size, -1) for each in (found, expected))
        yield from _exchanged(rows, right, allowed, dim)
        for count in (2, 3, 4):
            if size % count:
                continue
            blocks = expected.chunk(count, dim)
            for order in permutations(range(count)):
                if order == tuple(range(count)):
                    continue
                if difference(found, torch.cat([blocks[number] for number in order], dim)) <= allowed:
                    yield 1.0, f"the {count} blocks of dim {dim} are in the order {', '.join(map(str, order))}"
