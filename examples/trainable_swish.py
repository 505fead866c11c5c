"""Swish with a trainable slope (arXiv:1710.05941): x * sigmoid(beta * x), with one beta in each MLP.

python pretrain_gpt.py --extension examples/trainable_swish.py --activation-func trainable_swish ...
"""

import torch
from torch import Tensor, nn

from megatron.core.config import TransformerConfig
from megatron.core.config.activations import ACTIVATIONS
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.tensor_parallel.layers import TPContext, make_parameter


@ACTIVATIONS.register("trainable_swish")
class TrainableSwish(nn.Module):
    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        # A tensor-parallel rank applies beta to a part of the width, so the gradient of beta is a sum over ranks.
        meta = ParamMeta(f"{name}.beta", (1,), init=Init("ones"), partial_over=("tp",), role="vector")
        self.beta = make_parameter(meta, ctx)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)
