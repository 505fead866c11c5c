"""Sketches of tensors. A sketch consists of a few numbers. Two sketches are enough to decide whether two tensors are
bitwise equal, and to estimate the distance between the tensors.

A sketch consists of a hash of the bits, the norm, and several sums of the elements with random signs. If d is the
difference of two tensors, the square of a random-sign sum of d has the expected value |d|^2. The distance between two
tensors on different ranks, or from different layouts, can therefore be estimated without sending a tensor (AMS
sketches, Alon, Matias and Szegedy, STOC 1996).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

SIGNS = 4
"""Number of random-sign sums per sketch."""

COLUMNS = 2 + SIGNS
"""Number of int64 values per sketch: the hash, the norm and the random-sign sums. The norm and the random-sign sums are
float64 values whose bits are stored as int64."""

BLOCK = 1 << 14
"""Number of elements per block. Each position in a block has a random factor (`_random`), which is the same in all
blocks."""

AT_A_TIME = 256
"""Maximum number of blocks that one matrix product processes."""

_GOLDEN = -7046029254386353131
_MIXER = -4417276706812531889


@torch.no_grad()
def sketch_of(x: Tensor) -> Tensor:
    """Compute the sketch of a tensor on the device of `x`, without a synchronization. Return an int64 tensor
    [COLUMNS]. `x` may have any shape."""
    flat = x.detach().contiguous().view(-1)
    total = hash_of(flat)
    squares = torch.zeros((), dtype=torch.float64, device=x.device)
    sums = torch.zeros(SIGNS, dtype=torch.float64, device=x.device)
    signs = _random(x.device)[1]
    for first, blocks in _blocks(flat) if flat.is_floating_point() else ():
        numbers = blocks.double()
        squares += numbers.square().sum()
        rows = numbers @ signs[: blocks.shape[1]]
        sums += (rows * _random_of_blocks(first, len(blocks), x.device)[1]).sum(dim=0)
    return torch.cat([total[None], torch.cat([squares.sqrt()[None], sums]).view(torch.int64)])


@torch.no_grad()
def hash_of(x: Tensor) -> Tensor:
    """Hash a tensor to an int64 scalar: multiply the bits of each element by an odd number that depends on its
    position, and sum modulo 2^64. Changing any single bit changes the hash. The order of summation does not affect the
    hash."""
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    factors = _random(x.device)[0]
    for first, blocks in _blocks(_bits(x.detach().contiguous().view(-1))):
        rows = (blocks.long() * factors[: blocks.shape[1]]).sum(dim=1)
        total += (rows * _random_of_blocks(first, len(blocks), x.device)[0]).sum()
    return total


def _blocks(flat: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Divide a flat tensor into blocks of `BLOCK` elements; the last block may be shorter. Yield pairs: the number of
    the first block, and a tensor [number of blocks, elements per block]."""
    whole = flat.numel() // BLOCK
    for first in range(0, whole, AT_A_TIME):
        count = min(AT_A_TIME, whole - first)
        yield first, flat[first * BLOCK : (first + count) * BLOCK].view(count, BLOCK)
    if flat.numel() % BLOCK:
        yield whole, flat[whole * BLOCK :][None]


def sums_of(x: Tensor) -> Tensor:
    """Return the random-sign sums of a tensor as a float64 tensor of shape [SIGNS]. Random-sign sums are linear in
    `x`."""
    return sketch_of(x)[2:].view(torch.float64)


@lru_cache
def _random(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the random factors of each position in a block: odd int64 hash multipliers of shape [BLOCK], and float64
    signs (1 or -1) of shape [BLOCK, SIGNS]."""
    return _mixed(1, BLOCK, device)


@lru_cache(maxsize=64)
def _random_of_blocks(first: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the random factors of `count` consecutive blocks, starting with block number `first`: odd int64 hash
    multipliers of shape [count], and float64 signs (1 or -1) of shape [count, SIGNS]. The multiplier or sign of an
    element is the product of two factors: the factor of the element's block, and the factor of the element's position
    in the block."""
    return _mixed(BLOCK + 1 + first, count, device)


def _mixed(start: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a random odd int64 number and random signs for each of `count` consecutive integers. The numbers are
    computed with two rounds of a multiplicative hash."""
    mixed = torch.arange(start, start + count, device=device) * _GOLDEN
    mixed = (mixed ^ (mixed >> 29)) * _MIXER
    mixed = mixed ^ (mixed >> 32)
    signs = ((mixed[:, None] >> torch.arange(40, 40 + SIGNS, device=device)) & 1).double()
    return mixed | 1, 2 * signs - 1


def _bits(flat: Tensor) -> Tensor:
    """Reinterpret the elements of a flat tensor as integers with the same number of bytes."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat.view(integers[flat.element_size()])


def norm_of(row: Sequence[int]) -> float:
    """Return the tensor norm that a sketch contains."""
    return _floats(row)[0]


def distance(one: Sequence[int], other: Sequence[int], floor: float = 0.0) -> float:
    """Estimate the relative difference between two tensors from their sketches. The relative difference is the norm of
    the difference, divided by the largest of three values: the norms of the two tensors, and `floor`. Return 0 if the
    tensors are bitwise equal, and infinity if only one of the tensors contains non-finite values."""
    if one[0] == other[0]:
        return 0.0
    (norm, *sums), (other_norm, *other_sums) = _floats(one), _floats(other)
    finite = [all(map(math.isfinite, each)) for each in ((norm, *sums), (other_norm, *other_sums))]
    if not all(finite):
        return math.inf if any(finite) else 0.0
    gap = math.sqrt(sum((a - b) ** 2 for a, b in zip(sums, other_sums, strict=True)) / SIGNS)
    scale = max(norm, other_norm, floor)
    return gap / scale if scale else 0.0


def _floats(row: Sequence[int]) -> list[float]:
    found: list[float] = torch.tensor(list(row[1:]), dtype=torch.int64).view(torch.float64).tolist()
    return found
