"""Load balancing of experts: auxiliary losses, z-loss and expert bias, equal at every layout.

Auxiliary losses are means over the tokens of the global batch. They are added to the loss once, so that layouts and
micro-batch sizes cannot change them. Two things make that possible.

First, scaling. All other losses are token sums, which are divided by the number of valid tokens at the end of the step.
Gradients of auxiliary losses are injected during backward, so they carry that number in advance: it is known before the
first forward pass, and `aux_scale` = backward seed * valid tokens / tokens of the global batch.

Second, the load. The loss of Switch Transformer (Fedus et al., arXiv 2101.03961, equation 4) is E sum_i f_i P_i, with
f_i the share of assignments to expert i and P_i its mean probability, over the global batch. Its gradient in the first
micro-batch would need the f of the last one, when the pipeline already runs backward passes. So "aux_loss" takes f from
the previous global batch, and "global_aux_loss" from all previous ones. This load is part of the model's state, and
checkpoints hold it. The very first step has none, and no gradient from this loss. "seq_aux_loss" balances each sequence
by itself and is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.collectives import all_reduce_
from megatron.core.config.model import TransformerConfig
from megatron.core.moe.parameters import router_states
from megatron.core.parallel_state import Axis
from megatron.core.param_meta import ParamMeta
from megatron.core.tensor_parallel.layers import TPContext

EXTRA_COLUMNS = 3
"""Entries of a tally that are not per expert: balancing loss, z-loss, dropped assignments."""


class _Attach(torch.autograd.Function):
    """Passes `weights` through. The backward injects d loss = scale, and adds `entries` to the tally.

    The tally is updated in the backward, because recomputation would count a forward pass twice.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor, scale: Tensor, entries: Tensor, tally: Tensor) -> Tensor:
        ctx.values = scale.to(loss.dtype), entries, tally
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale, entries, tally = ctx.values
        tally.add_(entries)
        return grads[0], scale, None, None, None


class Balance(nn.Module):
    """Auxiliary losses and expert bias of one router, and the tally of the current step."""

    expert_bias: nn.Parameter | None
    """[E] added to the scores for the choice of experts (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.num_experts, self.topk = config.num_experts, config.moe_router_topk
        self.kind = config.moe_router_load_balancing_type
        self.coefficient = 0.0 if self.kind == "none" else config.moe_aux_loss_coeff
        self.z_coefficient = config.moe_z_loss_coeff
        self.bias_rate = config.moe_router_bias_update_rate
        self.sequence = ctx.experts.sequence
        self.load, *bias = (make_state(meta, dtype, ctx) for meta, dtype in router_states(name, config))
        """[E] share of assignments in the last global batch; for global_aux_loss summed over all batches."""
        self.expert_bias = bias[0] if bias else None
        self.tally = torch.zeros(2 * self.num_experts + EXTRA_COLUMNS, dtype=torch.float64, device=ctx.device)
        """Sums over the tokens of the step so far: assignments [E], probabilities [E], extra columns."""

    def forward(
        self,
        weights: Tensor,
        logits: Tensor,
        probabilities: Tensor,
        chosen: Tensor,
        unbiased: Tensor,
        kept: Tensor | None,
        scale: Tensor,
    ) -> Tensor:
        """Returns `weights` with the auxiliary losses of these tokens attached to their backward.

        logits, probabilities [s, b, E]; chosen [s, b, k]. `unbiased` [s, b, k] is the choice without expert bias, which
        the losses compare with the probabilities. kept [s, b, k] is None if no token is dropped.
        """
        balancing = self.balancing_loss(probabilities, unbiased)
        z = (logits if self.z_coefficient else logits.detach()).logsumexp(-1).square().sum()
        loss = self.coefficient * balancing + self.z_coefficient * z
        dropped = z.new_zeros(()) if kept is None else (~kept).sum()
        extra = [value.detach().to(torch.float64) for value in (balancing, z, dropped)]
        per_expert = self._assignments(chosen), probabilities.detach()
        entries = torch.cat([*(x.sum((0, 1), dtype=torch.float64) for x in per_expert), torch.stack(extra)])
        return _Attach.apply(weights, loss, scale, entries, self.tally)

    def balancing_loss(self, probabilities: Tensor, chosen: Tensor) -> Tensor:
        """Sum over these tokens of E sum_i f_i p_i: 1 a token under even load, E if one expert gets all."""
        if self.kind == "seq_aux_loss":
            counts = all_reduce_(self._assignments(chosen).sum(0), self.sequence)  # [b, E]
            share = counts.to(probabilities.dtype) / (self.topk * chosen.shape[0] * self.sequence.size)
            return self.num_experts * (share * probabilities.sum(0)).sum()
        share = (self.load / self.load.sum().clamp(min=1.0)).to(probabilities.dtype)
        return self.num_experts * (share * probabilities.sum((0, 1))).sum()

    def _assignments(self, chosen: Tensor) -> Tensor:
        """One-hot choice: chosen [s, b, k] -> [s, b, E]."""
        zeros = torch.zeros(*chosen.shape[:2], self.num_experts, device=chosen.device)
        return zeros.scatter_(-1, chosen, 1.0)

    @torch.no_grad()
    def end_step(self, sums: Tensor, skip: Tensor | None = None) -> Tensor:
        """Updates load and expert bias from `sums`, the tally of the global batch, unless the scalar `skip` is 1.

        Returns the assignments [E] and the extra columns, with the exact balancing loss of the batch.
        """
        states = [self.load] if self.expert_bias is None else [self.load, self.expert_bias]
        before = [state.clone() for state in states]
        counts, mass, extra = sums.split((self.num_experts, self.num_experts, EXTRA_COLUMNS))
        share = counts / counts.sum()
        if self.kind != "seq_aux_loss":
            extra[0] = self.num_experts * (share * mass).sum()
        if self.kind == "global_aux_loss":
            self.load.add_(share)
        else:
            self.load.copy_(share)
        if self.expert_bias is not None:
            self.expert_bias.add_(self.bias_rate * torch.sign(counts.mean() - counts))
        if skip is not None:
            for state, old in zip(states, before, strict=True):
                state.copy_(torch.where(skip > 0, old, state))
        self.tally.zero_()
        return torch.cat((counts, extra))


def make_state(meta: ParamMeta, dtype: str, ctx: TPContext) -> nn.Parameter:
    """Creates a model state of zeros that is not trained but saved in checkpoints. Every rank holds it whole."""
    state = nn.Parameter(
        torch.zeros(meta.global_shape, dtype=getattr(torch, dtype), device=ctx.device), requires_grad=False
    )
    state.meta = meta  # type: ignore[attr-defined]
    return state


@torch.no_grad()
def end_step(balances: Sequence[Balance], stage: Axis, skip: Tensor | None = None) -> Tensor:
    """Ends an optimizer step: sums tallies over the ranks of the pipeline stage, and updates load and bias.

    A skipped step (`skip` is 1) updates neither. Returns assignments and extra columns [layers, E + 3]. Collective over
    `stage`.
    """
    table = all_reduce_(torch.stack([balance.tally for balance in balances]), stage)
    return torch.stack([balance.end_step(sums, skip) for balance, sums in zip(balances, table, strict=True)])
