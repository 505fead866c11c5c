"""Check the fp8 flags. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, lcm
from typing import NamedTuple

from megatron.extensions.speed.fp8.flags import ALIGNMENT, TILE, Fp8Flags
from megatron.extensions.speed.fp8.flags import alignment as alignment_of
from megatron.training.config.flags import field_table, named_value
from megatron.training.config.problem import Problem, multiples
from megatron.training.config.rules.parallel import tokens_for_latents
from megatron.training.config.rules.pipeline import unsharded_by
from megatron.training.config.run_config import RunConfig

DELAYED_ONLY = ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")
BF16_LAYERS = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")


def fp8(c: RunConfig, world_size: int) -> Iterator[Problem]:
    yield from _formats(c)
    yield from _param_gather(c)
    yield from _comm_overlap(c)
    yield from _scaling(c)
    yield from _shapes(c)
    yield from _multi_token(c)
    if c.model.moe_latent_size is not None:
        yield from tokens_for_latents(c)


def _formats(c: RunConfig) -> Iterator[Problem]:
    p = c.parallel
    own = c.options(Fp8Flags)
    layers = c.model.num_layers
    if own.fp8_format is not None and not p.bf16:
        others = [f"--{name}" for name in ("fp16", "fp32", "fp64") if getattr(p, name)]
        rule = "needs bf16 parameters and activations"
        remedy = f"replace {others[0]} with --bf16" if others else "add --bf16"
        yield Problem("--fp8-format", own.fp8_format, rule, f"{remedy}, or remove --fp8-format")
    if own.first_last_layers_bf16 and own.fp8_format is None:
        yield Problem.no_effect("--first-last-layers-bf16", None, "--fp8-format")
    ends = tuple(getattr(own, name) for name in BF16_LAYERS)
    for name, value in zip(BF16_LAYERS, ends, strict=True):
        if value != 1 and not own.first_last_layers_bf16:
            yield Problem.no_effect(field_table()[name].name, value, "--first-last-layers-bf16")
    if own.fp8_format and own.first_last_layers_bf16 and min(ends) >= 0 and layers > 0 and sum(ends) >= layers:
        rule = f"{ends[0]} first and {ends[1]} last of {layers} layers leave no layer in fp8"
        remedy = "lower --num-layers-at-start-in-bf16 or --num-layers-at-end-in-bf16, or remove --fp8-format"
        yield Problem("--first-last-layers-bf16", None, rule, remedy)


def _param_gather(c: RunConfig) -> Iterator[Problem]:
    """Check that --fp8-param-gather has an effect, and that the recipe casts each weight only once."""
    own, flag = c.options(Fp8Flags), "--fp8-param-gather"
    if not own.fp8_param_gather:
        return
    if c.ddp.shards_gradients:
        strategy = f"--data-parallel-sharding-strategy {c.ddp.data_parallel_sharding_strategy}"
        yield Problem.exclusive(flag, None, strategy, "weights are gathered in the dtype of the parameters")
    if own.fp8_format is None:
        yield Problem.no_effect(flag, None, "--fp8-format")
    elif not c.optimizer.use_distributed_optimizer:
        off, remedy = unsharded_by(c)
        rule = f"has no effect with {off}: no parameters are gathered"
        yield Problem(flag, None, rule, f"remove {flag}, or {remedy}", harmless=True)
    elif own.fp8_recipe == "rowwise":
        rule = "needs a recipe with a single cast of each weight; --fp8-recipe rowwise makes two"
        yield Problem(flag, None, rule, f"remove {flag}, or use --fp8-recipe tensorwise, delayed or blockwise")


def _comm_overlap(c: RunConfig) -> Iterator[Problem]:
    """Check that the fp8 recipe supports communication overlap. With overlap, parts of a sequence are cast and
    multiplied separately, so each operand must have a single scale."""
    own = c.options(Fp8Flags)
    if own.fp8_format is None or not named_value(c, "tp_comm_overlap"):
        return
    if own.fp8_recipe in ("rowwise", "blockwise"):
        why = "parts of a sequence are cast with one scale for the whole tensor"
        yield Problem.exclusive("--fp8-recipe", own.fp8_recipe, "--tp-comm-overlap", why)
    if named_value(c, "tp_comm_overlap_method") == "symmetric":
        why = "it multiplies in the precision of the parameters"
        yield Problem.exclusive("--fp8-format", own.fp8_format, "--tp-comm-overlap-method symmetric", why)


def _scaling(c: RunConfig) -> Iterator[Problem]:
    """Report flags that have no effect under the chosen fp8 recipe."""
    own, table = c.options(Fp8Flags), field_table()
    if own.fp8_format is None and own.fp8_recipe != table["fp8_recipe"].default:
        yield Problem.no_effect("--fp8-recipe", own.fp8_recipe, "--fp8-format")
    if own.fp8_format is not None and own.fp8_recipe == "delayed":
        return
    needed = "--fp8-recipe delayed" if own.fp8_format is not None else "--fp8-format and --fp8-recipe delayed"
    for name in DELAYED_ONLY:
        value, flag = getattr(own, name), table[name]
        if value != flag.default:
            yield Problem.no_effect(flag.name, value, needed)


def _shapes(c: RunConfig) -> Iterator[Problem]:
    """Check that the dimensions of each rank's fp8 matrices (features and tokens) are aligned."""
    m = c.model
    p = c.parallel
    own = c.options(Fp8Flags)
    b = c.training.micro_batch_size
    tp, cp = p.tensor_model_parallel_size, p.context_parallel_size
    sizes = (tp, cp, b, m.hidden_size, m.num_attention_heads, m.seq_length)
    if own.fp8_format is None or min(sizes) < 1 or m.head_dim < 1:
        return
    alignment, under = alignment_of(c.parallel, tp)
    rank, cut = alignment * tp, f"{alignment} * --tensor-model-parallel-size {tp}"
    kinds = _kinds(c)
    if m.hidden_size % ALIGNMENT:
        rule = f"must be a multiple of {ALIGNMENT} under --fp8-format"
        near = multiples(m.hidden_size, lcm(ALIGNMENT, tp, m.num_attention_heads))
        yield Problem("--hidden-size", m.hidden_size, rule, near)
    for heads, flag in ((m.num_attention_heads, "--num-attention-heads"), (2 * m.query_groups, "--num-query-groups")):
        width = heads * m.head_dim
        if heads > 0 and width % rank and kinds.attention and m.attention_facts.grouped:
            what = "queries" if flag == "--num-attention-heads" else "keys and values"
            rule = f"{what} of {width} channels must be a multiple of {cut} under {under}"
            shown = m.num_attention_heads if what == "queries" else m.query_groups
            near = multiples(m.head_dim, rank // gcd(rank, heads))
            yield Problem(flag, shown, rule, f"add --kv-channels, {near}")
            break
    else:
        if kinds.attention:
            yield from _uneven_heads(c, rank, f"must be a multiple of {cut} under {under}")
    if kinds.dense and (wrong := next((width for width in _widths(c) if width % rank), None)):
        pattern = m.ffn_hidden_size_pattern
        flag = "--ffn-hidden-size-pattern" if pattern else "--ffn-hidden-size"
        rule = f"must be a multiple of {cut} under {under}"
        of_flag = f"has a layer of {wrong}, which {rule}" if pattern else rule
        yield Problem(flag, pattern or wrong, of_flag, multiples(wrong, rank))
    widths = [
        ("--moe-latent-size", m.moe_latent_size, ALIGNMENT, f"{ALIGNMENT} under --fp8-format"),
        ("--moe-shared-expert-intermediate-size", m.moe_shared_expert_intermediate_size, rank, f"{cut} under {under}"),
    ]
    if (etp := p.expert_tp) > 0 and kinds.experts:
        alignment, under = alignment_of(c.parallel, etp)
        of_experts = f"{alignment} * --expert-tensor-parallel-size {etp} under {under}"
        widths.append(("--moe-ffn-hidden-size", m.moe_ffn_size, alignment * etp, of_experts))
    for flag, size, step, of_step in widths:
        if size is not None and size > 0 and size % step:
            yield Problem(flag, size, f"must be a multiple of {of_step}", multiples(size, step))
    if own.fp8_recipe == "blockwise" and cp > 1 and m.seq_length % (2 * cp) == 0:
        # A context-parallel rank holds two chunks of the sequence.
        each, tile = m.seq_length // (2 * cp) * b, TILE // gcd(TILE, b)
        if each % TILE:
            rule = f"a rank has pieces of {each} tokens; under --fp8-recipe blockwise they must be multiples of {TILE}"
            near = multiples(m.seq_length, 2 * cp * tile)
            yield Problem("--seq-length", m.seq_length, rule, f"{near}, or another --micro-batch-size")
            return
    tokens = ALIGNMENT // gcd(ALIGNMENT, b)
    if m.seq_length % cp == 0 and m.seq_length // cp % tokens:
        each = m.seq_length // cp * b
        rule = f"a rank has {each} tokens of a micro-batch; under --fp8-format this must be a multiple of"
        near = multiples(m.seq_length, lcm(tokens * cp, 2 * cp if cp > 1 else 1))
        yield Problem("--seq-length", m.seq_length, f"{rule} {ALIGNMENT}", f"{near}, or another --micro-batch-size")


def _uneven_heads(c: RunConfig, rank: int, rule: str) -> Iterator[Problem]:
    """Check the sizes of the fp8 attention projections for each kind of layer. `rank` is the product of the required
    alignment and the tensor-parallel size. `rank` must divide the number of rows of the qkv projection (queries, gates,
    keys and values), and the number of columns of the output projection. `rule` is the part of the error message that
    states the required multiple."""
    try:
        kinds = dict.fromkeys(c.model.of_layer(number) for number in range(c.model.num_layers))
    except ValueError:
        return
    for m in kinds:
        if not m.attention_facts.grouped or m.query_groups < 1 or m.num_attention_heads % m.query_groups:
            continue
        rows, columns = m.query_groups * sum(m.group_rows), m.attention_output_size
        if rows % rank == columns % rank == 0:
            continue
        parts = "queries, gates, keys and values" if m.head_wise_attn_gate else "queries, keys and values"
        heads = f"{m.num_attention_heads} heads in {m.query_groups} groups"
        what = f"makes {rows} rows of {parts} and {columns} channels of values of {heads}; both {rule}"
        gates = m.num_attention_heads if m.head_wise_attn_gate else 0
        if gates % rank and (rows - gates) % rank == columns % rank == 0:
            yield Problem("--head-wise-attn-gate", None, what, f"use a number of heads that is a multiple of {rank}")
        elif m.value_head_dim != m.head_dim:
            yield Problem("--value-channels", m.value_channels, what, f"use a multiple of {ALIGNMENT}")
        else:
            yield Problem("--window-num-attention-heads", m.num_attention_heads, what, f"use a multiple of {rank}")


def _widths(c: RunConfig) -> tuple[int, ...]:
    """Return the widths of fp8 MLPs. If the layer pattern cannot be parsed, the result is empty, because another rule
    reports this error."""
    try:
        widths, dense = c.model.ffn_sizes, set(c.model.dense_layers)
    except ValueError:
        return ()
    return tuple(widths[layer] for layer in c.options(Fp8Flags).layers(c.model.num_layers) if layer in dense)


class _Kinds(NamedTuple):
    """For each kind of sublayer, whether it uses fp8 in at least one layer."""

    attention: bool
    dense: bool
    experts: bool


def _kinds(c: RunConfig) -> _Kinds:
    """Return which kinds of sublayers (attention, dense MLPs, experts) use fp8 in at least one layer. If the layer
    pattern cannot be parsed, the result contains no MLPs, because another rule reports this error."""
    try:
        every = c.model.layers
    except ValueError:
        return _Kinds(True, False, False)
    kinds = [every[number] for number in c.options(Fp8Flags).layers(c.model.num_layers)]
    return _Kinds(
        any(kind.attends and kind.linear is None for kind in kinds),
        any(kind.mlp and not kind.experts for kind in kinds),
        any(kind.experts for kind in kinds),
    )


def _multi_token(c: RunConfig) -> Iterator[Problem]:
    """Check the projection of multi-token prediction modules. On each rank, the number of output features is the hidden
    size divided by the tensor-parallel size. The projection uses fp8 only if the last transformer layer uses fp8."""
    m = c.model
    own = c.options(Fp8Flags)
    tp = c.parallel.tensor_model_parallel_size
    if min(m.mtp_depths, m.num_layers, m.hidden_size, tp) < 1 or m.num_layers - 1 not in own.layers(m.num_layers):
        return
    alignment, under = alignment_of(c.parallel, tp)
    if m.hidden_size % ALIGNMENT == 0 and m.hidden_size % (alignment * tp):
        cut = f"{alignment} * --tensor-model-parallel-size {tp}"
        rule = f"must be a multiple of {cut} under {under} with --mtp-num-layers"
        yield Problem("--hidden-size", m.hidden_size, rule, multiples(m.hidden_size, alignment * tp))
