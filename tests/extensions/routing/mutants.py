"""Mutants of routing."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron.core.parallel_state import Axis
from megatron.extensions.routing import routers
from tests.parity.mutants.common import mutant


@mutant(routers, "sinkhorn_bias", world="2", cp="2ring", mlp="moe", balancing="sinkhorn")
def _bias_by_local_places(logits: Tensor, places: Tensor, sequence: Axis) -> Tensor:
    """Sinkhorn over a part of the sequence."""
    return _true_sinkhorn_bias(logits, places, Axis())


@mutant(routers, "random_bits", world="4", tp="2sp", etp="1", mlp="moe", balancing="forced")
def _bits_of_local_places(key: Any, sample: Tensor, places: Tensor, n: int) -> Tensor:
    """Forced choices by places in a part of the sequence."""
    return _true_random_bits(key, sample, places % 8, n)


_true_sinkhorn_bias, _true_random_bits = routers.sinkhorn_bias, routers.random_bits
