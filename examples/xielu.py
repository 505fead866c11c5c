"""xIELU (arXiv:2411.13010): an activation with two trainable scalars, quadratic above zero and exponential below.

python pretrain_gpt.py --extension examples/xielu.py --activation-func xielu ...
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config import TransformerConfig
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.parts import ACTIVATIONS
from megatron.core.tensor_parallel.layers import TPContext, make_parameter

BETA, AT_START = 0.5, (0.2033, -1.0502)  # softplus(0.2033) = 0.8 and BETA + softplus(-1.0502) = 0.8


@ACTIVATIONS.register("xielu")
class XIELU(nn.Module):
    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        # Every tensor-parallel rank sees a part of the width, so its gradient is one term of a sum.
        meta = ParamMeta(f"{name}.alpha", (2,), init=Init("zeros"), partial_over=("tp",))
        self.alpha = make_parameter(meta, ctx)

    def forward(self, x: Tensor) -> Tensor:
        above, below = F.softplus(self.alpha + self.alpha.new_tensor(AT_START))
        negative = (below + BETA) * (torch.expm1(x.clamp(max=0)) - x)
        return torch.where(x > 0, above * x.square(), negative) + BETA * x
