"""Short causal convolution of each channel with itself (depthwise), in documents that do not see each other."""

from __future__ import annotations

import torch
from torch import Tensor


def short_convolution(
    x: Tensor, weight: Tensor, number: Tensor | None = None, before: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x [s, b, n, c], weight [n, c, taps] -> [s, b, n, c], in fp32 for 16 bits: y_t is the sum over j of
    weight_j x_{t - taps + 1 + j}; and the last taps - 1 rows, which are `before` for the tokens that follow.

    `number` [s, b] counts the documents that have begun, 0 for tokens of the document that `before`
    [taps - 1, b, n, c] is of; None for one document. Tokens of other documents count as 0.
    """
    taps = weight.shape[-1]
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    rows = torch.cat((x.new_zeros(taps - 1, *x.shape[1:]) if before is None else before, x))
    y, last = x * weight[..., -1], rows[len(x) :]
    if number is None:
        for back in range(1, taps):
            y = y + rows[taps - 1 - back : len(rows) - back] * weight[..., -1 - back]
        return y, last
    numbers = torch.cat((number.new_zeros(taps - 1, number.shape[1]), number))
    for back in range(1, taps):
        other = (numbers[taps - 1 - back : len(rows) - back] != number)[..., None, None]
        y = y + rows[taps - 1 - back : len(rows) - back].masked_fill(other, 0.0) * weight[..., -1 - back]
    return y, last.masked_fill((numbers[len(x) :] != number[-1])[..., None, None], 0.0)
