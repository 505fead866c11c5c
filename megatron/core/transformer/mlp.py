"""MLP of a transformer layer, which consists of a column-parallel linear layer, an activation function, and a
row-parallel linear layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from megatron.core.batch import BatchContext
from megatron.core.config.model import TransformerConfig
from megatron.core.kernels import kernel_for
from megatron.core.param_meta import Fused
from megatron.core.tensor_parallel.layers import TPContext, column_parallel, row_parallel
from megatron.core.tensor_parallel.linear_spec import ColumnLinear, RowLinear
from megatron.core.transformer.activations import FusedActivation, build_activation
from megatron.core.transformer.recompute import recomputed, with_input_recomputed


class MLP(nn.Module):
    """fc2(activation(fc1(x)))."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext, ffn_size: int | None = None) -> None:
        super().__init__()
        fc1, fc2 = mlp_linears(name, config, ffn_size or config.ffn_size)
        self.linear_fc1 = column_parallel(fc1, ctx)
        self.activation = build_activation(f"{name}.activation", config, ctx)
        self.linear_fc2 = row_parallel(fc2, ctx)
        fuses = isinstance(self.activation, FusedActivation) and self.activation.compiled
        self.activation_adds_bias = fuses and self.linear_fc1.bias is not None
        self.recompute, self.recompute_activation = config.recomputes("mlp"), config.recomputes("mlp_act")

    def forward(self, x: Tensor, context: BatchContext | None = None, addend: Tensor | None = None) -> Tensor:
        """Run the MLP: x [s, b, h] -> [s, b, h], or [s/tp, b, h] -> [s/tp, b, h] under sequence parallelism.

        If `addend` [s, b, h] is given, it is added to the result. Pass it only if `linear_fc2.takes_addend()` returns
        True.
        """
        return recomputed(self._run, x, addend) if self.recompute and self.training else self._run(x, addend)

    def _run(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        drops = self.recompute_activation and self.training
        if not drops and (kernel := kernel_for("mlp", self.linear_fc1, self.activation, self.linear_fc2)) is not None:
            return kernel(x, self.linear_fc1, self.linear_fc2, addend)
        activate: Callable[..., Tensor] = self.activation
        if self.activation_adds_bias:
            activate = partial(activate, bias=self.linear_fc1.bias)
        x = self.linear_fc1(x, add_bias=not self.activation_adds_bias)
        if drops:
            return with_input_recomputed(activate, x, partial(self.linear_fc2, addend=addend))
        return self.linear_fc2(activate(x), addend=addend)


def mlp_linears(name: str, config: TransformerConfig, ffn: int) -> tuple[ColumnLinear, RowLinear]:
    """Return the specifications of the linear layers `linear_fc1` and `linear_fc2`. If the MLP is gated, the weight of
    `linear_fc1` has the shape [2, ffn, h], stacks the gate and the up projection, and is sharded along ffn."""
    hidden, bias = config.hidden_size, config.add_bias_linear or config.add_mlp_bias
    out_dims, shard_dim = ((2, ffn), 1) if config.gated else ((ffn,), 0)
    fused = Fused("gate_up", 0, (1, 1)) if config.gated else None
    return (
        ColumnLinear(f"{name}.linear_fc1", hidden, out_dims, bias, shard_dim, fused),
        RowLinear(f"{name}.linear_fc2", ffn, hidden, bias),
    )


class SharedExpert(MLP):
    """Shared expert of a mixture-of-experts layer, that is, an MLP that processes every token."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__(name, config, ctx, ffn_size=config.moe_shared_expert_intermediate_size)
        self.recompute = config.recomputes("shared_experts")
        self.recompute_activation = config.recomputes("moe_act") and not self.recompute
