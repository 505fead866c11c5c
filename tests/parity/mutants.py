"""Is the parity matrix able to fail? Each reduction is broken on purpose, and the matrix must go red.

A mutant replaces one function of the product for one comparison; the one-process reference is computed before, from
the product as it is. `CAUGHT_BY` names combinations of the matrix that exercise what is broken.

    python -m tests.parity.mutants            every mutant against its combinations: what was seen, a line each
    python -m tests.parity.mutants --matrix   every mutant against the matrix until something is red
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron.core import collectives
from megatron.core import collectives as mappings
from megatron.core.attention import all_gather as gathered
from megatron.core.attention import core_attention, ring, tile_kernels, ulysses
from megatron.core.attention.alibi import alibi_slopes
from megatron.core.attention.partition import Documents, cut_documents
from megatron.core.attention.sinks import add_sinks_
from megatron.core.attention.tiles import Tile
from megatron.core.batch import Batch, BatchContext
from megatron.core.config.layers import Rotation
from megatron.core.config.model import TransformerConfig
from megatron.core.config.param_groups import ParamGroup
from megatron.core.distributed import finalize_model_grads as finalize
from megatron.core.distributed import grad_readiness as overlap
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.distributed.param_and_grad_buffer import UnitBucket
from megatron.core.kernels import stochastic_rounding
from megatron.core.models.gpt.multi_token import MultiTokenPrediction
from megatron.core.moe import dispatcher, experts, router
from megatron.core.moe import load_balancing as balance
from megatron.core.offload import saved_activations
from megatron.core.offload.host_pool import HostBuffer, HostPool
from megatron.core.optimizer import distrib_optimizer, matrix_exchange, muon, precision_aware, qk_clip
from megatron.core.optimizer.host_update import HostUpdate
from megatron.core.optimizer.matrix_plan import MatrixPlan
from megatron.core.parallel_state import Axis, ParallelState
from megatron.core.param_meta import ParamMeta
from megatron.core.pipeline_parallel import executor
from megatron.core.tensor_parallel import cross_entropy, layers, weight_grad
from megatron.core.tensor_parallel.parameters import ReplicatedLinear
from megatron.core.transformer import (
    activations,
    block,
    fused_norm,
    gated_delta_net,
    latent_attention,
    norm,
    rotary,
    self_attention,
    split_heads,
)
from megatron.core.transformer.parameters import DeltaNetParameters
from tests.parity.matrix import Combination, difference, reference, whole_matrix

Patch = tuple[Any, str, Any]


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In place of a reduction: it does not happen."""


def _unchanged(x: Tensor, axis: Axis) -> Tensor:
    """In place of a pair of collectives: neither of them happens."""
    return x


def _first_sinks(self: core_attention.CoreAttention) -> Tensor:
    sinks = self.softmax_offset
    assert sinks is not None
    return sinks[: len(sinks) // self.cp.size]


def _merge_with_a_sink(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, first: bool) -> None:
    part, part_lse = part.clone(), part_lse.clone()
    add_sinks_(part, part_lse, torch.zeros(part.shape[2], dtype=part.dtype))
    _true_merge_(out, lse, part, part_lse, first)


_true_merge_ = ring._merge_


def _backward_without_a_cap(self: Any, rows: Any, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> Any:
    shown = tile_kernels.TorchKernel(self.scale, self.dropout, self.slopes)
    shown._scores = self._scores  # type: ignore[method-assign]
    return _true_tile_backward(shown, rows, q, k, v, tile)


def _gated_without_gradient(x: Tensor, gate: Tensor) -> Tensor:
    return _true_head_gate(x, gate.detach())


_true_head_gate = self_attention.head_wise_gated_output


def _frequencies_of_other_layers(config: TransformerConfig, rotation: Rotation) -> Tensor:
    return _true_frequencies(config, config.rotation)


_true_frequencies = rotary.rotary_frequencies
_true_tile_backward = tile_kernels.TorchKernel._backward


def _latents_without_norms(self: Any, x: Tensor) -> latent_attention.Latents:
    kv, key = self.linear_kv_down(x).split((self.kv_rank, self.rotary_width), dim=-1)
    return latent_attention.Latents(self.linear_q_down(x), kv, self.to_heads(key, self.tp).unsqueeze(2))


def _partial_at_every_layout(self: ReplicatedLinear, sequence_parallel: bool) -> list[ParamMeta]:
    return _true_metas(self, sequence_parallel=True)


def _partial_at_no_layout(self: ReplicatedLinear, sequence_parallel: bool) -> list[ParamMeta]:
    return _true_metas(self, sequence_parallel=False)


_true_metas = ReplicatedLinear.metas


def _backward_of_the_norm_alone(x: Tensor, of_total: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    return _true_backward(x, None, *args)


def _weight_gradient_of_plain_rows(x: Tensor, of_total: Tensor | None, dy: Tensor, *args: Any) -> tuple[Tensor, ...]:
    dx, _, *of_bias = _true_backward(x, of_total, dy, *args)
    return dx, (dy * x).sum((0, 1)), *of_bias


def _normalized_without_the_sum(x: Tensor, update: Tensor, mask: Any, *args: Any) -> tuple[Tensor, ...]:
    return x, *fused_norm._normalized(x + update, *args)


def _update_as_if_all_were_kept(mask: Any, *args: Any) -> tuple[Tensor | None, ...]:
    dx, *of_parameters = _true_backward(*args)
    return dx, None, *of_parameters


def _rotated_forward_again(grads: Sequence[Tensor], tables: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    return _true_parts(grads, [tables[0], -tables[1]], *rest)


def _without_values(grads: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    return _true_parts((*grads[:-1], torch.zeros_like(grads[-1])), *rest)


def _bias_gradient_of_some_tokens(grads: Sequence[Tensor], *args: Any) -> tuple[Tensor, Tensor]:
    joined, _ = _true_joined(grads, *args)
    return joined, joined[1:].sum((0, 1))


_true_joined = split_heads._joined_and_summed


def _bias_gradient_of_some_rows(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    dx, _ = _true_biased_backward(x, *args)
    return dx, dx[1:].sum((0, 1))


def _own_shard_alone(x: Tensor, axis: Axis, out: Tensor) -> collectives.Pending:
    return collectives.Pending(out.zero_().chunk(axis.size)[axis.rank].copy_(x))


def _gradients_of_the_step_before(self: HostUpdate, chunk: int) -> None:
    shard: Any = self.shards[chunk]
    now = shard.device_grads.clone()
    shard.device_grads.copy_(getattr(shard, "before", now))
    _true_start_grads(self, chunk)
    shard.device_grads.copy_(now)
    shard.before = now


def _gradients_of_another_chunk(self: HostUpdate, chunk: int) -> None:
    earlier = self.shards[max(0, chunk - 1)].device_grads
    self._grads.start_copy(chunk, lambda slot: self._to_host.copy(earlier, slot[: earlier.numel()]))


def _without_the_factor(self: HostUpdate, lr: float, weight_decay: float, *args: Any) -> None:
    _true_host_update(self, lr, weight_decay, *args[:-1], False)


_true_start_grads, _true_host_update = HostUpdate._start_grads, HostUpdate.update


def _opened_empty(self: UnitBucket) -> None:
    self.drop_grads()
    _true_open_grads(self)


def _added_twice(self: UnitBucket) -> None:
    if self._reduced is not None:
        self.grad_shard.add_(self._reduced.wait())
    _true_finish_grad_sync(self)


def _replaced(self: UnitBucket) -> None:
    if self._reduced is not None:
        self.grad_shard.zero_()
    _true_finish_grad_sync(self)


def _updated_twice(*args: Any) -> list[Any]:
    rules = _true_rules(*args)
    return [*rules, rules[-1]]


_true_rules = distrib_optimizer._build_rules
_true_open_grads, _true_finish_grad_sync = UnitBucket.open_grads, UnitBucket.finish_grad_sync
_true_biased_backward = activations._biased_backward
_true_parts = split_heads._parts
_true_backward = fused_norm._backward


def _without_decay(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, number: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return _true_chunks(q, k, v, g * 0, beta, number)


def _without_states(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, number: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """In place of the gated delta rule: each chunk of 4 tokens begins with an empty state."""
    outs, states = zip(
        *(_true_chunks(*part) for part in zip(*(x.split(4) for x in (q, k, v, g, beta)), strict=True)), strict=True
    )
    return torch.cat(outs), states[-1]


_true_chunks = gated_delta_net.gated_delta_chunks


def _delta_net_norm_not_summed(name: str, config: TransformerConfig) -> DeltaNetParameters:
    found = _true_delta_net(name, config)
    return replace(found, out_norm=replace(found.out_norm, partial_over=()))


_true_delta_net = gated_delta_net.delta_net_parameters


def _first_heads(x: Tensor, axis: Axis) -> Tensor:
    return x[: len(x) // axis.size]


def _documents_of_own_rows(context: BatchContext, length: int, device: torch.device) -> Tensor | None:
    """As if the documents of whole samples were cut as far as this rank's rows go, time and again."""
    found = _true_begun(context, length, device)
    return found if context.places is None or found is None else found[: len(context.places)].repeat(2, 1)


_true_begun = gated_delta_net.documents_begun


def _bias_in_the_first_columns(y: Tensor, bias: Tensor, of_rows: Tensor, factors: Tensor | None, first: int) -> Tensor:
    return _true_with_bias(y, bias, of_rows, factors, 0)


def _bias_of_full_weight(y: Tensor, bias: Tensor, of_rows: Tensor, factors: Tensor | None, first: int) -> Tensor:
    return _true_with_bias(y, bias, of_rows, None, first)


_true_with_bias = experts._with_bias


def _router_not_summed(*args: Any) -> list[ParamMeta]:
    return [replace(meta, partial_over=()) for meta in _true_router_metas(*args)]


_true_router_metas = router.router_metas


def _no_gradient_of_input_weights(x: Tensor, weights: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return _true_weighted_rows(x, weights, grad)[0], torch.zeros_like(weights)


_true_weighted_rows = experts._gradients_of_weighted_rows


def _scales_of_rows(config: TransformerConfig, positions: Tensor) -> Tensor:
    return _true_query_scales(config, torch.arange(positions.shape[-1]))


_true_query_scales = block.query_scales


def _slice_rows(x: Tensor, axis: Axis) -> collectives.Pending:
    """In place of a reduce-scatter: this rank's rows, without the other ranks' part of the sum."""
    return collectives.Pending(mappings.local_slice(x, axis).contiguous())


def _without_reduction(name: str) -> Patch:
    """A layer boundary whose entry in the backward, or whose exit in the forward, does not reduce."""
    boundary = getattr(layers, name)
    plain = _slice_rows if "SEQUENCE" in name else collectives.start_nothing
    broken = {"enter_adjoint": plain} if name.startswith("COLUMN") else {"leave": plain}
    return layers, name, replace(boundary, **broken)


def _local_token_count(num_tokens: Tensor, state: ParallelState, loss_rank: int = -1) -> Tensor:
    return num_tokens.double() * state.dp.size * state.cp.size * (1 + 0.5 * (state.dp_cp.size > 1))


def _token_count_over_tp_too(num_tokens: Tensor, state: ParallelState, loss_rank: int = -1) -> Tensor:
    return _true_count(num_tokens, state, loss_rank) * state.tp.size


_true_count = finalize.global_token_count


def _count_all(meta: ParamMeta, coords: Any) -> bool:
    return True


def _local_stats_only(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    return torch.cat([x] * axis.size, dim)


class _SlopesOfTheFirstRank(list[float]):
    """In place of the slopes of all heads: any part of them is the first one."""

    def __getitem__(self, part: Any) -> Any:
        return list(self)[: part.stop - part.start]


def _distances_of_rows(tile: Tile, device: torch.device) -> Tensor:
    return torch.arange(len(tile.queries), device=device)[:, None] - torch.arange(len(tile.keys), device=device)


def _chunks_of_own_rows(documents: Documents | None, samples: int, length: int, longest: int) -> Documents:
    """Of two context-parallel ranks: as many chunks as a rank's rows have, not as the sequence has."""
    return cut_documents(documents, samples, length // 2, longest)


def _keep_own_gradient(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    return mappings.local_slice(x, axis, dim)


def _exchange_of_zeros(real: type) -> Callable[..., Any]:
    """Gradients of keys and values that are on their way around the ring arrive as zeros."""

    def exchange(x: Tensor, cp: Axis, tag: int) -> Any:
        return real(torch.zeros_like(x) if tag == 1 else x, cp, tag)

    return exchange


def _report_early(self: Any, microbatches: int) -> None:
    """Waits for one micro-batch less: the reduction starts before the last gradient is in."""
    _true_begin_step(self, microbatches - (self.per_microbatch is not None and microbatches > 1))


_true_begin_step = overlap.GradReadiness.begin_step


def _merge_without_weights(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, first: bool) -> None:
    if first:
        out.copy_(part)
    else:
        out.add_(part)
    lse.copy_(part_lse)


def _reversed_on_last_stage(self: Any, batches: Any, seed: Any, training: bool) -> None:
    """The last stage pairs hidden states with the labels of another micro-batch."""
    _true_begin(self, list(reversed(batches)) if self.pp.size > 1 and self.pp.last else batches, seed, training)


_true_begin = executor.PipelineExecutor._begin


def _rows_before_they_arrive(self: dispatcher.Exchange, tensors: Sequence[Tensor]) -> list[Tensor]:
    """What is received is read while the all-to-all is under way."""
    started = [dispatcher.start_all_to_all(x, list(self.send), list(self.receive), self.axis) for x in tensors]
    early = [pending.result.clone() for pending in started]
    self.overlap.hand_over()
    for pending in started:
        pending.wait()
    return early


def _sum_of_all_slots(y: Tensor, slots: Tensor, valid: Tensor | None, k: int) -> Tensor:
    """A token gets another one's row for each expert that dropped it."""
    index = slots if valid is None else torch.where(valid, slots, 0)
    return y.index_select(0, index).unflatten(0, (-1, k)).sum(1)


def _own_rows_only(x: Tensor, outgoing: list[int], incoming: list[int], axis: Axis) -> collectives.Pending:
    """In place of the exchange of matrices: of each one there is what this rank holds of it, and zeros."""
    result, sent, kept = x.new_zeros(sum(incoming)), sum(outgoing[: axis.rank]), sum(incoming[: axis.rank])
    result[kept : kept + incoming[axis.rank]] = x[sent : sent + outgoing[axis.rank]]
    return collectives.Pending(result)


def _shards_as_matrices(self: MatrixPlan, meta: ParamMeta, splits: Any, blockwise: bool) -> Any:
    return _true_matrices(self, meta, splits, True)


def _next_matrix(self: Any, current: Any, received: Tensor) -> list[Tensor]:
    return [stack.roll(1, 0) for stack in _true_stacked(self, current, received)]


def _without_nesterov(self: Any, config: Any, *args: Any) -> None:
    _true_muon(self, replace(config, muon_nesterov=False), *args)


_true_matrices, _true_stacked = MatrixPlan._matrices_of, matrix_exchange.MatrixExchange._stacked
_true_muon = muon.Muon.__init__


def _labels_too_near(self: Batch, depths: int) -> Batch:
    """Each depth of multi-token prediction is trained on the label of the depth before."""
    batch = _true_future(self, depths)
    assert batch.future_labels is not None
    nearer = torch.cat((self.labels[:, :, None], batch.future_labels[:, :, :-1]), dim=2)
    return replace(batch, future_labels=nearer)


def _last_tokens_count(self: Batch, depths: int) -> Batch:
    """Tokens whose label lies beyond the sample count, with token 0 for it."""
    batch = _true_future(self, depths)
    assert batch.future_loss_mask is not None
    return replace(batch, future_loss_mask=torch.ones_like(batch.future_loss_mask))


_true_future = Batch.with_future


def _factor_twice(self: Any, *args: Any) -> Tensor:
    return self.weight * _true_prediction(self, *args)


_true_prediction = MultiTokenPrediction.forward


def _free_when_taken(self: HostPool, nbytes: int) -> HostBuffer:
    """In place of a buffer of its own: the next one who asks for as many bytes has it too."""
    buffer = _true_take(self, nbytes)
    self.give_back(buffer)
    return buffer


def _sent_noted(self: Any, x: Tensor, buffer: HostBuffer) -> None:
    _true_send(self, x, buffer)
    self.__dict__.setdefault("latest", {})[len(x)] = buffer


def _latest_fetched(self: Any, buffer: HostBuffer, nbytes: int) -> Any:
    """What was sent last of that size: another layer's, or another micro-batch's."""
    return _true_fetch(self, self.latest[nbytes], nbytes)


def _moved_as_seen(self: saved_activations.Part, x: Tensor) -> Any:
    """The second view of memory that travels gets the place of the first one."""
    view = _true_pack(self, x)
    return view if isinstance(view, Tensor) else view._replace(offset=0)


_true_take, _true_pack = HostPool.take, saved_activations.Part.pack
_true_send, _true_fetch = saved_activations.Copies.send, saved_activations.Copies.fetch


# What is broken, how, and combinations that must notice.
def _lr_without_its_factor(self: ParamGroup, lr: float, decoupled_lr: float | None) -> float:
    return lr


def _noise_by_place(key: Tensor, salt: int) -> Tensor:
    return _true_uniform_of(torch.arange(len(key), dtype=torch.int32), salt)


_true_uniform_of = stochastic_rounding.uniform_of


def _of_this_rank_alone(x: Tensor, axis: Axis, op: Any) -> Tensor:
    return x


def _whole_factor_in_rotary_keys(self: Any, eta: Tensor, alpha: float) -> dict[Any, Tensor]:
    factors = _true_clip_factors(self, eta, alpha)
    factors[self.linear_q][:, self.key_width :] = eta[:, None] ** alpha
    return factors


_true_clip_factors = latent_attention.MultiLatentAttention.clip_factors

STATES = Combination.of(world="8", tp="2sp", pp="2", states="bf16", groups="own", optimizer="overlapped")
CLIPPED = Combination.of(world="4", tp="2", cp="2ring", update="clipped", heads="gqa")
CLIPPED_LATENTS = Combination.of(world="4", cp="2ulysses", update="clipped", heads="mla")

OFFLOADED = Combination.of(world="2", pp="2", activations="2 offloaded", heads="gqa", style="llama")
OFFLOADED_SPLIT = Combination.of(world="2", pp="2", schedule="zb-h1", activations="2 offloaded", recompute="selective")

MUTANTS: dict[str, tuple[list[Patch], list[Combination]]] = {
    "a host buffer is taken again before its backward": (
        [(HostPool, "take", _free_when_taken)],
        [OFFLOADED, OFFLOADED_SPLIT],
    ),
    "the activations of another micro-batch are fetched": (
        [(saved_activations.Copies, "send", _sent_noted), (saved_activations.Copies, "fetch", _latest_fetched)],
        [OFFLOADED_SPLIT, OFFLOADED],
    ),
    "offloaded views begin where their memory does": (
        [(saved_activations.Part, "pack", _moved_as_seen)],
        [OFFLOADED],
    ),
    "the factor of a group's learning rate is lost": ([(ParamGroup, "lr", _lr_without_its_factor)], [STATES]),
    "states are rounded by their place in a shard": (
        [(precision_aware, "uniform_of", _noise_by_place)],
        [STATES],
    ),
    "the largest logits of a head are those of one context-parallel rank": (
        [(qk_clip, "all_reduce_", _of_this_rank_alone)],
        [CLIPPED, CLIPPED_LATENTS],
    ),
    "rotary queries are clipped like those without position": (
        [(latent_attention.MultiLatentAttention, "clip_factors", _whole_factor_in_rotary_keys)],
        [CLIPPED_LATENTS],
    ),
    "row-parallel forward all-reduce dropped": ([_without_reduction("ROW")], [Combination.of(world="2", tp="2")]),
    "column-parallel backward all-reduce dropped": (
        [_without_reduction("COLUMN")],
        [Combination.of(world="2", tp="2")],
    ),
    "sequence-parallel forward reduce-scatter takes its own part": (
        [_without_reduction("ROW_SEQUENCE")],
        [Combination.of(world="2", tp="2sp")],
    ),
    "sequence-parallel backward reduce-scatter takes its own part": (
        [_without_reduction("COLUMN_SEQUENCE")],
        [Combination.of(world="2", tp="2sp")],
    ),
    "cross entropy over the local vocabulary only": (
        [(cross_entropy, "all_gather", _local_stats_only)],
        [Combination.of(world="2", tp="2")],
    ),
    "partial gradients of norms not summed over tp": (
        [(finalize, "_sum_partial_grads", _nothing)],
        [Combination.of(world="2", tp="2sp"), Combination.of(world="2", tp="2", style="llama")],
    ),
    "tied embeddings not summed over stages": (
        [(finalize, "_sum_shared_grads", _nothing)],
        [Combination.of(world="2", pp="2"), Combination.of(world="4", pp="2", optimizer="overlapped")],
    ),
    "data-parallel reduction dropped": (
        [(param_and_grad_buffer.Bucket, "start_grad_sync", _nothing)],
        [Combination.of(world="2"), Combination.of(world="2", optimizer="replicated")],
    ),
    "stale parameters: the gather after the update dropped": (
        [(param_and_grad_buffer.Bucket, "start_param_sync", _nothing)],
        [Combination.of(world="2"), Combination.of(world="2", optimizer="overlapped")],
    ),
    "overlapped reduction starts a micro-batch early": (
        [(overlap.GradReadiness, "begin_step", _report_early)],
        [Combination.of(world="2", optimizer="overlapped")],
    ),
    "loss scaled by a count of the wrong group (data)": (
        [("step", "global_token_count", _local_token_count)],
        [Combination.of(world="2"), Combination.of(world="2", cp="2ring")],
    ),
    "loss scaled by a count of the wrong group (tensor)": (
        [("step", "global_token_count", _token_count_over_tp_too)],
        [Combination.of(world="2", tp="2")],
    ),
    "gradient norm counts every replica": (
        [(ParamMeta, "is_first_replica", _count_all)],
        [Combination.of(world="2", tp="2"), Combination.of(world="2", pp="2")],
    ),
    "ring attention loses gradients of keys and values": (
        [(ring, "RingExchange", _exchange_of_zeros(ring.RingExchange))],
        [Combination.of(world="2", cp="2ring"), Combination.of(world="4", cp="4ring")],
    ),
    "ring attention adds parts without their weights": (
        [(ring, "_merge_", _merge_without_weights)],
        [Combination.of(world="2", cp="2ring", style="llama")],
    ),
    "gathered keys get only their own rank's gradient": (
        [(gathered, "all_gather_sequence", lambda x, axis: mappings.gather_from(x, axis, dim=0))],
        [Combination.of(world="2", cp="2gather")],
    ),
    "sinks of the first heads, not of this rank's": (
        [(core_attention.CoreAttention, "_sinks", property(_first_sinks))],
        [Combination.of(world="2", cp="2ulysses", softmax="sinks")],
    ),
    "sinks get no gradient": (
        [(ring, "sinks_grad", lambda grad, out, lse, sinks: torch.zeros_like(sinks))],
        [Combination.of(world="2", tp="2", softmax="sinks")],
    ),
    "each part of a row has the sink": (
        [(ring, "_merge_", _merge_with_a_sink)],
        [Combination.of(world="2", cp="2ring", softmax="off by one")],
    ),
    "gates of heads get no gradient": (
        [(self_attention, "head_wise_gated_output", _gated_without_gradient)],
        [Combination.of(world="2", tp="2", block="parallel"), Combination.of(world="2", cp="2ring", block="parallel")],
    ),
    "layers with windows rotated as other layers": (
        [(rotary, "rotary_frequencies", _frequencies_of_other_layers)],
        [Combination.of(world="2", pp="2", style="llama", layers="own heads")],
    ),
    "projections to latents of experts not summed over tp": (
        [(ReplicatedLinear, "metas", _partial_at_no_layout)],
        [Combination.of(world="2", tp="2sp", mlp="moe", routing="groups")],
    ),
    "slope of a cap of scores forgotten": (
        [(tile_kernels.TorchKernel, "_backward", _backward_without_a_cap)],
        [Combination.of(world="2", softmax="off by one"), Combination.of(world="2", cp="2ring", softmax="off by one")],
    ),
    "ALiBi slopes of the first rank's heads": (
        [(core_attention, "alibi_slopes", lambda heads: _SlopesOfTheFirstRank(alibi_slopes(heads)))],
        [Combination.of(world="2", tp="2", style="bloom"), Combination.of(world="2", cp="2ulysses", style="bloom")],
    ),
    "ALiBi distances of a rank's rows, not of positions": (
        [(tile_kernels, "distances", _distances_of_rows)],
        [Combination.of(world="2", cp="2ring", style="bloom"), Combination.of(world="4", cp="4ring", style="bloom")],
    ),
    "kinds of layers by place in the stage, not by number": (
        [(TransformerConfig, "layer", lambda self, number: self.layers[number % 3])],
        [
            Combination.of(world="2", pp="2", style="llama", layers="bases"),
            Combination.of(world="2", pp="2", style="llama", layers="chunks"),
        ],
    ),
    "chunks of a rank's rows, not of the sequence": (
        [(core_attention, "cut_documents", _chunks_of_own_rows)],
        [
            Combination.of(world="2", cp="2gather", layers="chunks"),
            Combination.of(world="2", cp="2ring", layers="chunks"),
        ],
    ),
    "sum of squares of a rank's own heads": (
        [(norm, "reduce_from", lambda x, axis: x)],
        [
            Combination.of(world="2", tp="2", block="wide norms"),
            Combination.of(world="2", tp="2sp", block="wide norms"),
        ],
    ),
    "gradient of the sum of squares from a rank's own heads": (
        [(norm, "copy_to", lambda x, axis: x)],
        [Combination.of(world="2", tp="2", block="wide norms")],
    ),
    "gradient of the residual stream lost in the fused norm": (
        [(fused_norm, "_backward", _backward_of_the_norm_alone)],
        [Combination.of(world="2", tp="2sp", regions="fused", style=style) for style in ("llama", "gpt")],
    ),
    "gradient of the fused norm's weight from rows that are not normalized": (
        [(fused_norm, "_backward", _weight_gradient_of_plain_rows)],
        [Combination.of(world="1", regions="fused", style="llama"), Combination.of(world="2", regions="fused")],
    ),
    "gradient of what dropout drops before the fused norm": (
        [(fused_norm, "_backward_of_both", _update_as_if_all_were_kept)],
        [Combination.of(world="2", tp="2sp", regions="fused"), Combination.of(world="1", regions="fused")],
    ),
    "update left out of the stream by the fused norm": (
        [(fused_norm, "_added_and_normalized", _normalized_without_the_sum)],
        [Combination.of(world="2", regions="fused", style="llama"), Combination.of(world="2", regions="fused")],
    ),
    "gradient of a bias before an activation from a part of the rows": (
        [(activations, "_biased_backward", _bias_gradient_of_some_rows)],
        [Combination.of(world="2", tp="2", regions="fused"), Combination.of(world="2", regions="fused", style="bloom")],
    ),
    "gradients of queries and keys rotated forward once more": (
        [(split_heads, "_parts", _rotated_forward_again)],
        [Combination.of(world="2", style="gptj"), Combination.of(world="2", style="gemma", heads="gqa")],
    ),
    "gradient of the bias of queries, keys and values from a part of the tokens": (
        [(split_heads, "_joined_and_summed", _bias_gradient_of_some_tokens)],
        [Combination.of(world="2", tp="2sp", regions="fused", style=style) for style in ("gptj", "bloom", "gpt")],
    ),
    "gradient of values lost where queries and keys are rotated": (
        [(split_heads, "_parts", _without_values)],
        [Combination.of(world="2", style="gptj"), Combination.of(world="2", style="gemma", heads="gqa")],
    ),
    "parameters that are gathered before an update read after it": (
        [(UnitBucket, "drop_params", lambda self: None)],
        [
            Combination.of(world="2", optimizer="parameters"),
            Combination.of(world="4", pp="2", schedule="zb-h1", optimizer="parameters"),
        ],
    ),
    "a gather of other ranks' shards left out": (
        [(param_and_grad_buffer, "start_all_gather", _own_shard_alone)],
        [Combination.of(world="2", optimizer="parameters", style="llama")],
    ),
    "gradients of a unit dropped before all of them have been reduced": (
        [(UnitBucket, "open_grads", _opened_empty)],
        [
            Combination.of(world="2", optimizer="gradients"),
            Combination.of(world="4", ep="2", mlp="moe", optimizer="parameters"),
        ],
    ),
    "gradients not added up over instances": (
        [(param_and_grad_buffer.ParamAndGradBuffer, "start_copies_sync", lambda self: [])],
        [
            Combination.of(world="4", optimizer="parameters", instances="2"),
            Combination.of(world="2", instances="2"),
        ],
    ),
    "a shard of gradients added twice": (
        [(UnitBucket, "finish_grad_sync", _added_twice)],
        [Combination.of(world="2", optimizer="parameters"), Combination.of(world="2", optimizer="gradients")],
    ),
    "a shard updated twice": (
        [(distrib_optimizer, "_build_rules", _updated_twice)],
        [
            Combination.of(world="2", optimizer="parameters"),
            Combination.of(world="4", optimizer="gradients", instances="2"),
            Combination.of(world="2", optimizer="parameters", update="muon"),
        ],
    ),
    "only the last micro-batch in a shard of gradients": (
        [(UnitBucket, "finish_grad_sync", _replaced)],
        [Combination.of(world="4", pp="2", schedule="zb-v", optimizer="gradients")],
    ),
    "parameters not copied back from the host": (
        [(HostUpdate, "_start_params", _nothing)],
        [Combination.of(offload="part"), Combination.of(world="2", optimizer="parameters", offload="part")],
    ),
    "states on the host updated with the gradient of the step before": (
        [(HostUpdate, "_start_grads", _gradients_of_the_step_before)],
        [Combination.of(offload="part"), Combination.of(world="2", optimizer="gradients", offload="part")],
    ),
    "states on the host updated with the gradient of another chunk": (
        [(HostUpdate, "_start_grads", _gradients_of_another_chunk)],
        [Combination.of(world="2", offload="part")],
    ),
    "gradients on the host not clipped": (
        [(HostUpdate, "update", _without_the_factor)],
        [Combination.of(world="2", offload="part"), Combination.of(offload="part", states="bf16")],
    ),
    "rotary keys' gradient not summed over tp": (
        [(latent_attention, "copy_to", _unchanged)],
        [Combination.of(world="2", tp="2", heads="mla", style="llama")],
    ),
    "gradients of projections to latents counted tp times": (
        [(ReplicatedLinear, "metas", _partial_at_every_layout)],
        [Combination.of(world="2", tp="2", heads="mla", style="llama")],
    ),
    "decay of gated delta nets ignored": (
        [(gated_delta_net, "gated_delta_chunks", _without_decay)],
        [Combination.of(layers="delta nets")],
    ),
    "states of gated delta nets not passed from chunk to chunk": (
        [(gated_delta_net, "gated_delta_chunks", _without_states)],
        [Combination.of(layers="delta nets")],
    ),
    "gradient of a gated delta net's norm not summed over ranks": (
        [(gated_delta_net, "delta_net_parameters", _delta_net_norm_not_summed)],
        [Combination.of(world="2", tp="2", layers="delta nets")],
    ),
    "gated delta nets with the convolutions and decays of the first context rank": (
        [(gated_delta_net, "local_slice", _first_heads)],
        [Combination.of(world="2", cp="2ring", layers="delta nets")],
    ),
    "gated delta nets read a sequence in order of ranks": (
        [(ulysses, "from_rank_order", lambda x, size: x), (ulysses, "to_rank_order", lambda x, size: x)],
        [Combination.of(world="2", cp="2gather", layers="delta nets")],
    ),
    "gated delta nets with the documents of a part of the sequence": (
        [(gated_delta_net, "documents_begun", _documents_of_own_rows)],
        [Combination.of(world="2", cp="2ring", layers="delta nets", documents="packed")],
    ),
    "norms of latents skipped": (
        [(latent_attention.MultiLatentAttention, "_latents", _latents_without_norms)],
        [Combination.of(world="2", heads="mla", style="llama")],
    ),
    "weight gradients left in the queue": (
        [(weight_grad.WeightGradQueue, "run", lambda self, key: self._jobs.pop(key))],
        [Combination.of(world="2", pp="2", schedule="zb-h1"), Combination.of(world="2", pp="2", schedule="zb-v")],
    ),
    "last stage takes micro-batches in another order": (
        [(executor.PipelineExecutor, "_begin", _reversed_on_last_stage)],
        [Combination.of(world="2", pp="2")],
    ),
    "experts' sums over expert tensor ranks dropped": (
        [(dispatcher, "reduce_scatter", _keep_own_gradient)],
        [
            Combination.of(world="2", tp="2sp", mlp="moe"),
            Combination.of(world="4", ep="4", mlp="moe", dispatcher="allgather"),
        ],
    ),
    "experts' rows read before they have arrived": (
        [(dispatcher.Exchange, "_run", _rows_before_they_arrive)],
        [
            Combination.of(world="4", pp="2", ep="2", mlp="moe", schedule="interleaved2", expert_messages="in turns"),
            Combination.of(world="2", ep="2", mlp="moe"),
        ],
    ),
    "bias of an expert's output in the columns of another rank": (
        [(experts, "_with_bias", _bias_in_the_first_columns)],
        [Combination.of(world="2", tp="2sp", mlp="biased")],
    ),
    "bias of an expert's output without the expert's weight": (
        [(experts, "_with_bias", _bias_of_full_weight)],
        [Combination.of(mlp="biased"), Combination.of(world="2", ep="2", mlp="biased")],
    ),
    "gradients of gates beyond their bound": (
        [(activations, "_within", lambda x, clamp: torch.ones_like(x))],
        [Combination.of(mlp="biased"), Combination.of(mlp="biased", regions="fused")],
    ),
    "gradients of the router not summed over the parts of the sequence": (
        [(router, "router_metas", _router_not_summed)],
        [Combination.of(world="2", tp="2sp", mlp="biased")],
    ),
    "no gradient of the weights of experts' inputs": (
        [(experts, "_gradients_of_weighted_rows", _no_gradient_of_input_weights)],
        [Combination.of(mlp="moe", routing="weighted inputs")],
    ),
    "temperature by a rank's rows, not by positions": (
        [(block, "query_scales", _scales_of_rows)],
        [Combination.of(world="2", cp="2ring", style="gptj", layers="tempered")],
    ),
    "norms of queries and keys without weights skipped": (
        [(norm, "_divided_by_root_mean_square", lambda x, eps: x)],
        [Combination.of(style="gptj", layers="tempered")],
    ),
    "padding of experts' messages summed": (
        [(dispatcher, "sum_of_slots", _sum_of_all_slots)],
        [Combination.of(world="2", ep="2", mlp="drops", expert_messages="padded")],
    ),
    "a ZeRO shard orthogonalized by itself": (
        [(matrix_exchange, "start_all_to_all", _own_rows_only)],
        [Combination.of(world="2", update="muon"), Combination.of(world="2", tp="2", update="muon")],
    ),
    "a tensor-parallel shard orthogonalized by itself": (
        [(MatrixPlan, "_matrices_of", _shards_as_matrices)],
        [Combination.of(world="2", tp="2", update="muon")],
    ),
    "the momentum of another matrix orthogonalized": (
        [(matrix_exchange.MatrixExchange, "_stacked", _next_matrix)],
        [Combination.of(world="2", update="muon"), Combination.of(world="2", update="muon", mlp="moe", ep="2")],
    ),
    "Nesterov's look-ahead forgotten": (
        [(muon.Muon, "__init__", _without_nesterov)],
        [Combination.of(world="2", update="muon")],
    ),
    "labels of multi-token prediction shifted by one too few": (
        [(Batch, "with_future", _labels_too_near)],
        [Combination.of(multi_token="1"), Combination.of(world="2", cp="2ring", multi_token="2")],
    ),
    "last tokens of multi-token prediction not masked": (
        [(Batch, "with_future", _last_tokens_count)],
        [Combination.of(multi_token="2"), Combination.of(world="2", pp="2", multi_token="1")],
    ),
    "factor of multi-token prediction applied twice": (
        [(MultiTokenPrediction, "forward", _factor_twice)],
        [Combination.of(multi_token="2"), Combination.of(world="2", pp="2", multi_token="1")],
    ),
    "the embedding's copy for multi-token prediction not summed over stages": (
        [(finalize, "_sum_shared_grads", _nothing)],
        [Combination.of(world="2", pp="2", embeddings="untied", multi_token="1")],
    ),
    "auxiliary loss from the local part of the sequence": (
        [(balance, "all_reduce_", lambda x, axis: x)],
        [Combination.of(world="2", cp="2ring", mlp="moe")],
    ),
}


@contextmanager
def planted(patches: Sequence[Patch]) -> Iterator[None]:
    """The product with a mutant in it."""
    from megatron.training import forward_backward as step

    running = []
    try:
        for target, name, broken in patches:
            patcher = mock.patch.object(step if target == "step" else target, name, broken)
            patcher.start()
            running.append(patcher)
        yield
    finally:
        for patcher in running:
            patcher.stop()


def seen(name: str, combination: Combination) -> str | None:
    """What the matrix says of a combination with the mutant planted; None if it notices nothing."""
    reference(tuple(combination.model_argv))
    with planted(MUTANTS[name][0]):
        try:
            return difference(combination)
        except (RuntimeError, TimeoutError) as error:
            return f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:160]}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--matrix", action="store_true", help="look for the first red combination of the whole matrix")
    args = parser.parse_args(argv)
    survivors = []
    for name, (_, combinations) in MUTANTS.items():
        red = None
        for combination in whole_matrix() if args.matrix else combinations:
            said = seen(name, combination)
            if said is not None or not args.matrix:
                red = said
                print(f"{name} | {combination} | {said or 'NOT NOTICED'}", flush=True)
                if args.matrix or said is None:
                    break
        if red is None:
            survivors.append(name)
    print(f"{len(MUTANTS)} mutants, {len(survivors)} survived: {survivors or 'none'}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
