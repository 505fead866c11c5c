"""The feed-forward half of a layer: column-parallel, activation, row-parallel."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.core.batch import BatchContext
from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import Init
from megatron.core.tensor_parallel.comm_overlap import column_parallel, row_parallel
from megatron.core.tensor_parallel.layers import TPContext
from megatron.core.transformer.activations import build_activation
from megatron.core.transformer.recompute import recomputed, with_input_recomputed


class MLP(nn.Module):
    """fc2(activation(fc1(x))). A gated fc1 stacks gate and up as [2, ffn, h], each cut over the ranks."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext, ffn_size: int | None = None) -> None:
        super().__init__()
        hidden, ffn, bias = config.hidden_size, ffn_size or config.ffn_size, config.add_bias_linear
        out_dims, shard_dim = ((2, ffn), 1) if config.gated else ((ffn,), 0)
        init, output_init = (Init("normal", std) for std in (config.init_method_std, config.output_init_std))
        self.linear_fc1 = column_parallel(ctx)(
            f"{name}.linear_fc1", hidden, out_dims, ctx, shard_dim=shard_dim, bias=bias, init=init
        )
        self.activation = build_activation(f"{name}.activation", config, ctx)
        self.linear_fc2 = row_parallel(ctx)(f"{name}.linear_fc2", ffn, hidden, ctx, bias=bias, init=output_init)
        self.recompute = "mlp" in config.recomputed_modules
        self.recompute_activation = config.recomputes_activation

    def forward(self, x: Tensor, context: BatchContext | None = None) -> Tensor:
        """x [s, b, h] -> [s, b, h]; [s/tp, b, h] under sequence parallelism"""
        return recomputed(self._run, x) if self.recompute and self.training else self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        x = self.linear_fc1(x)
        if self.recompute_activation and self.training:
            return with_input_recomputed(self.activation, x, self.linear_fc2)
        return self.linear_fc2(self.activation(x))
