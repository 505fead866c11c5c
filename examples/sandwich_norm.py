"""Sandwich norm (arXiv:2105.13290), which normalizes not only the input of each sublayer, but also its output before it
is added to the residual stream.

python pretrain_gpt.py --extension examples/sandwich_norm.py --layer-module sandwich ...
"""

from torch import Tensor

from megatron.core.batch import BatchContext
from megatron.core.config import TransformerConfig
from megatron.core.config.layers import LAYERS
from megatron.core.tensor_parallel.layers import TPContext
from megatron.core.transformer.layer import TransformerLayer
from megatron.core.transformer.norm import build_norm


@LAYERS.register("sandwich")
class SandwichLayer(TransformerLayer):
    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__(name, config, ctx)
        self.post_attention_layernorm = build_norm(f"{name}.post_attention_layernorm", config.hidden_size, config, ctx)
        self.post_mlp_layernorm = build_norm(f"{name}.post_mlp_layernorm", config.hidden_size, config, ctx)

    def forward(self, x: Tensor, context: BatchContext) -> Tensor:
        """x [s, b, h] -> [s, b, h]. Sequence parallelism divides s by tp."""
        attended = self.self_attention(self.input_layernorm(x), context)
        x = x + self.attention_dropout(self.post_attention_layernorm(attended), context)
        transformed = self.mlp(self.pre_mlp_layernorm(x), context)
        return x + self.mlp_dropout(self.post_mlp_layernorm(transformed), context)
