"""ALiBi, attention with linear biases (arXiv:2108.12409): the slope of each head. No torch.

A head adds slope * (key position - query position) to its scores before the softmax. There are no parameters, and no
longest sequence.
"""

from __future__ import annotations


def alibi_slopes(heads: int) -> list[float]:
    """The slopes of all heads of a layer, as BLOOM has them.

    For a power of two, the geometric sequence that starts at 2^(-8 / heads) and ends at 2^-8 (section 3). Otherwise
    the sequence of the power of two below, followed by every other slope of the sequence of twice that power.
    """
    power = 1 << (heads.bit_length() - 1)
    below = [2 ** (-8 * number / power) for number in range(1, power + 1)]
    between = [2 ** (-4 * number / power) for number in range(1, 2 * (heads - power), 2)]
    return below + between
