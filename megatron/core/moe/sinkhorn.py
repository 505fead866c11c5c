"""Sinkhorn routing: experts chosen so that those of each sequence receive about equally many tokens.

The rows (tokens) and columns (experts) of exp(logits) are scaled until all rows have equal sums, and all columns too.
A token's experts are then those of its k largest entries (Clark et al., arXiv 2202.01169, S-BASE). A token's own factor
does not affect its choice, so what remains is a bias of each expert, in the logarithm.

Tokens of a sequence are scaled together, whichever ranks hold them, and no others: neither layout nor micro-batch size
changes the choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.collectives import all_gather
from megatron.core.parallel_state import Axis

ITERATIONS = 16
"""A fixed number: a test for convergence would wait for the device, and could end differently at another layout."""


@torch.no_grad()
def sinkhorn_bias(logits: Tensor, places: Tensor, sequence: Axis) -> Tensor:
    """Logarithms of the experts' Sinkhorn factors: logits [s, b, E] of this rank's tokens -> [b, E].

    `places` [s] are the tokens' places in their sequences, which ranks along `sequence` hold. Collective over it.
    """
    whole = all_gather(logits, sequence)[all_gather(places, sequence).argsort()]  # in the same order at every layout
    bias = whole.new_zeros(whole.shape[1:])
    for _ in range(ITERATIONS):
        of_tokens = (whole + bias).logsumexp(-1, keepdim=True)
        bias = -(whole - of_tokens).logsumexp(0)
    return bias
