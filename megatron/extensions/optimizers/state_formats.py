"""Optimizer states in fewer bits than fp32: rounding, scales of blocks, and main parameters as remainders.

Rounding is stochastic: up or down with the probability that makes the expected value exact. Rounded to nearest, a
moment in bf16 or fp8 would stand still, since one update changes it by less than half the distance to its neighbour.
The random bits are a hash of the element's main parameter and the number of the update, so that a step depends neither
on the layout nor on a generator's state, and a resumed run makes the same steps.

fp16 and fp8 (e4m3) have a power of two for each block of 64 elements as a scale. Buffers align parameters and shards to
such blocks, so that no sharding of a buffer cuts one. The second moment is stored as its square root in these formats,
which needs half the exponents; its rounding makes the expected square exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.dropout import round_to_bf16
from megatron.extensions.optimizers.flags import SCALE_BLOCK

SMALLEST = -126
"""Exponent of the smallest scale; blocks of smaller numbers are zero to fp32 too."""


@dataclass(frozen=True)
class StateFormat:
    """A number format in which an optimizer state is stored."""

    dtype: torch.dtype
    mantissa: int
    """Bits of the mantissa that are stored."""

    least: int = SMALLEST
    """Exponent of the smallest normal number."""

    largest: float | None = None
    """Largest number, of formats with scales."""

    exported: torch.dtype | None = None
    """Dtype that holds every stored value exactly, where the stored one has scales. Checkpoints have it."""

    @property
    def scaled(self) -> bool:
        return self.largest is not None


FORMATS = {
    "fp32": StateFormat(torch.float32, 23),
    "bf16": StateFormat(torch.bfloat16, 7),
    "fp16": StateFormat(torch.float16, 10, -14, 65504.0, torch.float32),
    "fp8": StateFormat(torch.float8_e4m3fn, 3, -6, 448.0, torch.bfloat16),
}


class StoredState:
    """One flat state of a shard, in a format of `FORMATS`. With `squared` it is a second moment, never negative.

    `numel` is a multiple of the block of scales. A format of fp32 becomes `main_dtype`.
    """

    def __init__(
        self, numel: int, name: str, main_dtype: torch.dtype, device: torch.device, squared: bool = False
    ) -> None:
        self.format, self.squared = FORMATS[name], squared and FORMATS[name].scaled
        dtype = main_dtype if name == "fp32" else self.format.dtype
        self.codes = torch.zeros(numel, dtype=dtype, device=device)
        blocks = numel // SCALE_BLOCK if self.format.scaled else 0
        self.exponents = torch.full((blocks,), SMALLEST, dtype=torch.int8, device=device)
        self.rounds = name != "fp32"

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.exponents.nbytes

    def tensors(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """(codes, exponents) of elements [start, stop), which are whole blocks: views."""
        return self.codes[start:stop], self.exponents[start // SCALE_BLOCK : -(-stop // SCALE_BLOCK)]

    def read(self, codes: Tensor, exponents: Tensor) -> Tensor:
        """Values of `tensors`, in fp32 or the main dtype."""
        if not self.rounds:
            return codes
        if not self.format.scaled:
            return codes.float()
        values = (codes.float().view(-1, SCALE_BLOCK) * power_of_two(exponents)[:, None]).view(-1)
        return values.square() if self.squared else values

    def rounded(self, values: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor | None]:
        """(codes, exponents) of values, rounded up where `uniform`, in [0, 1), is below the probability; 0.5 rounds
        to nearest."""
        if not self.rounds:
            return values, None
        values = values.float()
        if not self.format.scaled:
            return round_to_bf16(values, uniform), None
        values = values.sqrt() if self.squared else values
        blocks = values.view(-1, SCALE_BLOCK)
        exponents = scale_exponents(blocks.abs().amax(1), self.format)
        scaled = (blocks / power_of_two(exponents)[:, None]).view(-1)
        codes = round_scaled(scaled, uniform, self.format, self.squared)
        return codes.to(self.format.dtype), exponents.to(torch.int8)

    def exported(self) -> Tensor:
        """Contents of a checkpoint: the memory itself without scales, else a copy on the host, exact."""
        if not self.format.scaled:
            return self.codes
        return on_host(self.codes.numel(), self.format.exported, lambda *part: self.read(*self.tensors(*part)))

    def take_up(self, values: Tensor) -> None:
        """Stores what a checkpoint held in the tensor of `exported`."""
        if not self.format.scaled:
            return
        for start, stop in chunks(self.codes.numel()):
            part = values[start:stop].to(self.codes.device).float()
            codes, exponents = self.rounded(part, torch.full_like(part, 0.5))
            assert exponents is not None
            for own, new in zip(self.tensors(start, stop), (codes, exponents), strict=True):
                own.copy_(new)


def chunks(numel: int, size: int = 2**22) -> list[tuple[int, int]]:
    """[start, stop) of parts of at most `size` elements, which bound the memory of temporary tensors."""
    return [(start, min(start + size, numel)) for start in range(0, numel, size)]


def on_host(numel: int, dtype: torch.dtype | None, read: Callable[[int, int], Tensor]) -> Tensor:
    """`read` of all elements, part by part, in host memory."""
    values = torch.empty(numel, dtype=dtype)
    for start, stop in chunks(numel):
        values[start:stop].copy_(read(start, stop))
    return values


def power_of_two(exponents: Tensor) -> Tensor:
    """2^e in fp32, exactly, of integers from -126 to 127."""
    return ((exponents.to(torch.int32) + 127) << 23).view(torch.float32)


def scale_exponents(amax: Tensor, number: StateFormat) -> Tensor:
    """The least e for which amax / 2^e is at most the format's largest number; int32. Values that have been rounded at
    such a scale are exact at the scale that follows from them."""
    assert number.largest is not None
    ratio = (amax / number.largest).view(torch.int32)
    above = (ratio & 0x7FFFFF) != 0
    exponents = (ratio >> 23) - 127 + above.to(torch.int32)
    return exponents.clamp(SMALLEST, 127)


def round_scaled(x: Tensor, uniform: Tensor, number: StateFormat, squared: bool) -> Tensor:
    """Rounds to the format's numbers, which stay in fp32. The expected value, or if `squared` its square, is exact."""
    assert number.largest is not None
    magnitude = x.abs()
    exponent = (magnitude.view(torch.int32) >> 23).clamp(min=number.least + 127)
    step = ((exponent - number.mantissa) << 23).view(torch.float32)
    low = torch.floor(magnitude / step) * step
    share = (magnitude - low) / step
    if squared:
        share = share * (magnitude + low) / (2 * low + step)
    rounded = torch.where(uniform < share, low + step, low).clamp(max=number.largest)
    return torch.copysign(rounded, x)


def split_master(values: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 -> (the nearest bf16, ties away from zero, what is left as int16): 32 bits in all, nothing is lost."""
    bits = values.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


def join_master(params: Tensor, remainders: Tensor) -> Tensor:
    """The fp32 numbers that `split_master` made two of."""
    return ((params.view(torch.int16).to(torch.int32) << 16) + remainders.to(torch.int32)).view(torch.float32)
