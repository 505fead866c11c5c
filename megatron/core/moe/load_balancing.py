"""Expert load balancing: auxiliary losses, z-loss and expert bias. The results are the same under every parallel
layout.

Auxiliary losses are means over the tokens of the global batch. The value of an auxiliary loss does not depend on the
parallel layout or on the micro-batch size. To achieve this, the gradients are scaled and the expert loads are running
means, as explained below.

Scaling: all other losses are sums over tokens, and their gradients are divided by the number of valid tokens at the end
of the step. The gradients of auxiliary losses are added to the same gradients during the backward pass, but must not be
divided by the number of valid tokens. The gradients of auxiliary losses are therefore multiplied by `aux_scale` in
advance, which is the initial gradient of the backward pass * valid tokens / all tokens of the global batch. The number
of valid tokens is known before the first forward pass.

Expert loads: the loss of Switch Transformer (Fedus et al., arXiv 2101.03961, equation 4) is E sum_i f_i P_i, where f_i
is the share of assignments to expert i and P_i is the mean probability of expert i. If f were computed over the global
batch (arXiv 2501.11873), the gradient of the first micro-batch would depend on the assignments of the last micro-batch.
The pipeline, however, runs the first backward pass before the last forward pass. Therefore "aux_loss" and
"global_aux_loss" use running means of f: for the tokens of sample j, f counts only the assignments of samples 0 to j of
the global batch. The order of the samples is their order in the global batch, so f does not depend on which rank
processes which samples. "seq_aux_loss" balances each sequence separately.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron.core.batch import BatchContext
from megatron.core.collectives import Pending, all_reduce_, start_all_reduce_
from megatron.core.config.model import TransformerConfig
from megatron.core.parallel_state import Axis, ParallelState
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.tensor_parallel.layers import TPContext
from megatron.core.torch_private import AutogradContext

EXTRA_COLUMNS = 3
"""Number of scalar router statistics: the balancing loss, the z-loss and the number of dropped assignments."""

PER_EXPERT = 4
"""Number of router statistics with one value per expert: the assignments, the accepted assignments, the assignments
that would be made without expert bias, and the sum of the probabilities."""


class RunningLoads:
    """Running expert loads. For each sample of the global batch, the loads are the shares of assignments to each
    expert, counted over this sample and all earlier samples.

    The forward pass of a micro-batch launches an all-reduce of its assignment counts, and the backward pass of the
    micro-batch waits for the result. If the forward pass is recomputed, the counts of its first run are used.
    """

    def __init__(self, state: ParallelState) -> None:
        self.stage, self.dp = state.axis("stage"), state.dp
        self.clear()

    def clear(self) -> None:
        """Begin a step."""
        for pending in getattr(self, "_started", {}).values():
            pending.wait()
        self._started: dict[int, Pending] = {}
        self._shares: list[Tensor] = []  # by micro-batch
        self._total: Tensor | float = 0.0

    def start(self, number: int, counts: Tensor) -> None:
        """Launch the all-reduce of the assignment counts of micro-batch `number`. `counts` [b, E] contains the number
        of assignments of this rank's tokens, per sample and expert. All ranks of the stage must call this method."""
        if number in self._started or number < len(self._shares):
            return
        rows = counts.new_zeros(self.dp.size, *counts.shape)
        rows[self.dp.rank] = counts
        self._started[number] = start_all_reduce_(rows, self.stage)

    def shares(self, number: int) -> Tensor:
        """Return the expert loads for each sample of micro-batch `number`, [b, E] float64. The loads for a sample are
        the shares of assignments to each expert, counted over all samples up to and including that sample.

        The method raises ValueError if the pipeline schedule has not yet run the forward passes of all micro-batches up
        to `number`.
        """
        while (done := len(self._shares)) <= number:
            if done not in self._started:
                raise ValueError(
                    f"the pipeline schedule runs the backward pass of micro-batch {number} before the forward pass of "
                    f"micro-batch {done}, but the balancing loss needs the expert loads of that forward pass; use "
                    "--moe-router-load-balancing-type seq_aux_loss, or a schedule that keeps the order of micro-batches"
                )
            rows = self._started.pop(done).wait().double()  # [dp, b, E], in the order of the samples
            so_far = rows.flatten(0, 1).cumsum(0) + self._total
            self._total = so_far[-1]
            own = so_far.view_as(rows)[self.dp.rank]
            self._shares.append(own / own.sum(-1, keepdim=True))
        return self._shares[number]


class _LoadsContext(AutogradContext):
    loads: RunningLoads
    number: int
    shape: torch.Size


class _AgainstRunningLoads(torch.autograd.Function):
    """Autograd function of the balancing loss with running loads f, that is, the sum of E * sum_i f_i p_i over tokens.
    p [s, b, E] are the probabilities. Because f is not known before the backward pass, the forward pass returns 0
    instead of the value of the loss."""

    @staticmethod
    def forward(ctx: _LoadsContext, probabilities: Tensor, loads: RunningLoads, number: int) -> Tensor:
        ctx.loads = loads
        ctx.number = number
        ctx.shape = probabilities.shape
        return probabilities.new_zeros(())

    @staticmethod
    def backward(ctx: _LoadsContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        share = ctx.loads.shares(ctx.number).to(grads[0].dtype)
        return (grads[0] * ctx.shape[-1] * share).expand(ctx.shape), None, None


class _AttachContext(AutogradContext):
    scale: Tensor
    entries: Tensor
    tally: Tensor


class _Attach(torch.autograd.Function):
    """Autograd function that returns `weights` unchanged. The backward pass also backpropagates through `loss`, with
    `scale` as the gradient of `loss`, and adds `entries` to the tally.

    The tally is updated in the backward pass, because the forward pass runs twice if it is recomputed.
    """

    @staticmethod
    def forward(
        ctx: _AttachContext, weights: Tensor, loss: Tensor, scale: Tensor, entries: Tensor, tally: Tensor
    ) -> Tensor:
        ctx.scale = scale.to(loss.dtype)
        ctx.entries = entries
        ctx.tally = tally
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: _AttachContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.tally.add_(ctx.entries)
        return grads[0], ctx.scale, None, None, None


class Balance(nn.Module):
    """Auxiliary losses and expert bias of one router, and the router statistics of the current step."""

    expert_bias: nn.Parameter | None
    """Expert bias [E] that is added to the scores when experts are selected (DeepSeek-V3, arXiv 2412.19437, section
    2.1.2). None if the router has no expert bias."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext, weight: nn.Parameter) -> None:
        """Create the load-balancing state of a router.

        `weight` is the router weight. If the router weight is frozen, the expert bias is frozen too.
        """
        super().__init__()
        self.num_experts, self.topk = config.moe_choices, config.moe_router_topk
        self.is_trained = lambda: weight.requires_grad
        self.running_coeff = config.moe_balancing_coeff("aux_loss", "global_aux_loss")
        self.sequence_coeff = config.moe_balancing_coeff("seq_aux_loss")
        self.of_sequences = "seq_aux_loss" in config.moe_router_load_balancing_type
        both = self.running_coeff + self.sequence_coeff
        self.has_loss, self.running_share = (
            both > 0,
            self.running_coeff / both if both else float(not self.of_sequences),
        )
        self.z_coefficient = config.moe_z_loss_coeff
        self.bias_rate = config.moe_router_bias_update_rate
        self.sequence = ctx.state.axis("tp_cp")
        self.loads = RunningLoads(ctx.state)
        biased = config.moe_router_enable_expert_bias
        bias = ParamMeta(f"{name}.expert_bias", (config.moe_choices,), init=Init("zeros"), role="state")
        self.expert_bias = make_state(bias, torch.float32, ctx) if biased else None
        self.tally = torch.zeros(PER_EXPERT * self.num_experts + EXTRA_COLUMNS, dtype=torch.float64, device=ctx.device)
        """Router statistics, summed over the tokens of the step so far. The tensor consists of `PER_EXPERT` vectors of
        E elements each, followed by `EXTRA_COLUMNS` scalars."""

    def forward(
        self,
        weights: Tensor,
        logits: Tensor,
        probabilities: Tensor,
        chosen: Tensor,
        unbiased: Tensor,
        kept: Tensor | None,
        context: BatchContext,
    ) -> Tensor:
        """Compute the auxiliary losses of this rank's tokens in a micro-batch, and return `weights` unchanged. The
        backward pass of the returned tensor adds the gradients of the auxiliary losses.

        Args:
            weights: Routing weights [s, b, k].
            logits: Router logits [s, b, E].
            probabilities: Router probabilities [s, b, E].
            chosen: Selected experts [s, b, k].
            unbiased: Experts that would be selected without expert bias [s, b, k]. The balancing losses count these
                assignments.
            kept: Mask of the assignments that are kept [s, b, k], or None if no assignment is dropped.
            context: The micro-batch's context.
        """
        assert context.aux_scale is not None
        assigned = self._assignments(chosen)
        wanted = assigned if unbiased is chosen else self._assignments(unbiased)
        balancing, of_sequences = self.balancing_losses(probabilities, wanted.sum(0), context.number)
        z = (logits if self.z_coefficient else logits.detach()).logsumexp(-1).square().sum()
        loss = balancing + self.z_coefficient * z
        dropped = z.new_zeros(()) if kept is None else (~kept).sum()
        extra = [value.detach().to(torch.float64) for value in (of_sequences, z, dropped)]
        accepted = assigned if kept is None else self._assignments(chosen, kept)
        per_expert = assigned, accepted, wanted, probabilities.detach()
        entries = torch.cat([*(x.sum((0, 1), dtype=torch.float64) for x in per_expert), torch.stack(extra)])
        return _Attach.apply(weights, loss, context.aux_scale, entries, self.tally)

    def balancing_losses(self, probabilities: Tensor, counts: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Return two scalars. The first is the sum of the balancing losses of this rank's tokens in a micro-batch, each
        multiplied by its coefficient. The second is the value of "seq_aux_loss" without its coefficient.

        Each balancing loss is the sum of E * sum_i f_i p_i over tokens. The term of a token is 1 if the load is
        balanced, and E if a single expert receives all tokens. `counts` [b, E] contains the number of assignments of
        this rank's tokens in micro-batch `number`, per sample and expert. In the forward pass, only "seq_aux_loss" can
        be computed. The other balancing losses are returned as 0, because the loads are not known yet.
        """
        loss = of_sequences = probabilities.new_zeros(())
        if self.running_coeff:
            self.loads.start(number, counts)
            loss = self.running_coeff * _AgainstRunningLoads.apply(probabilities, self.loads, number)
        if self.of_sequences:
            counts = all_reduce_(counts, self.sequence)
            length = probabilities.shape[0] * self.sequence.size
            share = counts.to(probabilities.dtype) / (self.topk * length)
            of_sequences = self.num_experts * (share * probabilities.sum(0)).sum()
            loss = loss + self.sequence_coeff * of_sequences
        return loss, of_sequences

    def _assignments(self, chosen: Tensor, kept: Tensor | None = None) -> Tensor:
        """Convert selected experts to a 0/1 mask of assignments: chosen [s, b, k] -> [s, b, E]. Assignments for which
        the mask `kept` [s, b, k] is False are left out."""
        zeros = torch.zeros(*chosen.shape[:2], self.num_experts, device=chosen.device)
        return zeros.scatter_(-1, chosen, 1.0 if kept is None else kept.to(zeros.dtype))

    def begin_step(self) -> None:
        """Discard the expert loads of the previous step."""
        self.loads.clear()

    @torch.no_grad()
    def end_step(self, sums: Tensor, skip: Tensor | None = None) -> Tensor:
        """Update the expert bias from `sums`, which is the tally of the global batch. If the scalar `skip` is 1, the
        expert bias is not changed.

        The update of the bias depends only on the assignments that experts accepted. Return a tensor [E + 3] that
        contains the number of assignments to each expert (including dropped assignments), the balancing loss, the
        z-loss and the number of dropped assignments. If there are two balancing losses, the returned balancing loss is
        their mean, weighted by their coefficients.
        """
        *per_expert, extra = sums.split((*[self.num_experts] * PER_EXPERT, EXTRA_COLUMNS))
        assigned, accepted, wanted, mass = per_expert
        if self.running_share:
            extra[0].lerp_(self.num_experts * (wanted / wanted.sum() * mass).sum(), self.running_share)
        if self.expert_bias is not None and self.is_trained():
            moved = self.expert_bias + self.bias_rate * torch.sign(accepted.mean() - accepted)
            self.expert_bias.copy_(moved if skip is None else torch.where(skip > 0, self.expert_bias, moved))
        self.tally.zero_()
        return torch.cat((assigned, extra))


def make_state(meta: ParamMeta, dtype: torch.dtype, ctx: TPContext) -> nn.Parameter:
    """Create a zero-initialized model state, which is saved in checkpoints but has no gradient. The state is replicated
    on every rank."""
    state = nn.Parameter(torch.zeros(meta.global_shape, dtype=dtype, device=ctx.device), requires_grad=False)
    state.meta = meta  # type: ignore[attr-defined]
    return state


@torch.no_grad()
def end_step(balances: Sequence[Balance], stage: Axis, skip: Tensor | None = None) -> Tensor:
    """Sum the tallies over all ranks of the pipeline stage at the end of an optimizer step, and update the expert
    biases.

    If `skip` is 1, the expert biases are not updated. Return a tensor [layers, E + 3] with one row per layer: the
    number of assignments to each expert, the balancing loss, the z-loss and the number of dropped assignments. All
    ranks of `stage` must call this function.
    """
    table = all_reduce_(torch.stack([balance.tally for balance in balances]), stage)
    return torch.stack([balance.end_step(sums, skip) for balance, sums in zip(balances, table, strict=True)])
