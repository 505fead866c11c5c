"""Coefficients of the Newton-Schulz iteration that orthogonalizes a matrix. This module does not import torch.

A step with the coefficients (a, b, c) maps each singular value s to a*s + b*s**3 + c*s**5. The iteration need not
converge: for a matrix of norm 1, a few steps bring all singular values close enough to 1.
"""

from __future__ import annotations

Coefficients = tuple[float, float, float]
"""Coefficients (a, b, c) of one Newton-Schulz step."""

COEFFICIENTS: dict[str, tuple[Coefficients, ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    "cans": (
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
}
"""Sets of coefficients, keyed by name. Each set is a sequence of coefficients, one entry for each step.

"simple" is from Muon (Jordan, 2024), and is also used by Moonlight (arXiv 2502.16982). "quintic" (Cesista) is optimized
for five steps. "polar_express" is algorithm 1 of arXiv 2505.16932, with the paper's safety factor 1.01. "cans" is from
arXiv 2506.10935.
"""

CYCLES = ("simple", "quintic")
"""Names of the coefficient sets that are repeated from the first entry if there are more steps than entries. For the
other sets, only the last entry is repeated."""


def coefficients(kind: str, steps: int) -> tuple[Coefficients, ...]:
    """Return the coefficients of the first `steps` Newton-Schulz steps, one entry per step. `kind` is a key of
    `COEFFICIENTS`."""
    known = COEFFICIENTS[kind]
    return tuple(known[i % len(known) if kind in CYCLES else min(i, len(known) - 1)] for i in range(steps))
