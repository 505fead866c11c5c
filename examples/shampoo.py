"""Shampoo optimizer (arXiv:1802.09568). The update of a matrix with gradient G is L^(-1/4) G R^(-1/4), where L [m, m]
accumulates G G^T, and R [n, n] accumulates G^T G.

python pretrain_gpt.py --extension examples/shampoo.py --optimizer shampoo --shampoo-interval 10 ...

Embeddings, the output layer and vectors are updated by Adam.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megatron.core.config.flag_spec import flag
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.optimizers import OPTIMIZERS
from megatron.core.optimizer.transforms import (
    AdamMoments,
    AddDecay,
    ParameterUpdate,
    Requests,
    ScaleByRate,
    State,
    Transform,
    elements,
    matrix_size,
    of_matrices,
)
from megatron.core.param_meta import ParamMeta
from megatron.training.extensions import extension_flags


@extension_flags("Shampoo")
@dataclass(frozen=True)
class ShampooConfig:
    shampoo_momentum: float = flag(0.9, at_least=0, below=1)
    """Decay of the average of the updates."""
    shampoo_eps: float = flag(1e-6, above=0)
    """Number that is added to the diagonals of the factors L and R."""
    shampoo_interval: int = flag(1, above=0)
    """Recompute the inverse fourth roots of the factors L and R every this many updates."""


class Shampoo(Transform):
    def __init__(self, config: OptimizerConfig) -> None:
        self.options = config.options(ShampooConfig)

    def states(self, meta: ParamMeta) -> Sequence[State]:
        m, n = matrix_size(meta)
        factors = [of_matrices(name, meta, m, m) for name in ("left", "left_root")]
        factors += [of_matrices(name, meta, n, n) for name in ("right", "right_root")]
        return [*factors, elements("momentum", meta)]

    def flops(self, meta: ParamMeta) -> int:
        m, n = matrix_size(meta)
        roots = (m**3 + n**3) // self.options.shampoo_interval
        return 2 * prod(meta.global_shape[: meta.stacked]) * (2 * m * n * (m + n) + roots)

    def update(self, x: ParameterUpdate) -> Requests:
        options, due = self.options, int(x.step.item() - 1) % self.options.shampoo_interval == 0

        def precondition(matrix: Tensor, states: dict[str, Tensor]) -> Tensor:
            for name, square in ("left", matrix @ matrix.mT), ("right", matrix.mT @ matrix):
                states[name] += square
                if due:
                    states[f"{name}_root"].copy_(inverse_root(states[name], options.shampoo_eps))
            return states["left_root"] @ matrix @ states["right_root"]

        direction = yield from x.whole(x.update, precondition)
        x.update = x.states["momentum"].mul_(options.shampoo_momentum).add_(direction)


def inverse_root(x: Tensor, eps: float) -> Tensor:
    """Return (x + eps I)^(-1/4) of a symmetric matrix x, where I is the identity matrix."""
    values, vectors = torch.linalg.eigh(x)
    return (vectors * (values.clamp(min=0) + eps) ** -0.25) @ vectors.mT


@OPTIMIZERS.register("shampoo")
def shampoo(config: OptimizerConfig, meta: ParamMeta) -> Sequence[Transform]:
    hidden = meta.matrix and meta.role in ("hidden", "router")
    return [Shampoo(config) if hidden else AdamMoments(config), AddDecay(), ScaleByRate()]
