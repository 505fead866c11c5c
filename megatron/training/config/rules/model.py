"""Rules for the shape, tensor parallelism and multi-token prediction of the model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress

from megatron.core.config.activations import ACTIVATIONS
from megatron.core.config.layers import RESIDUALS
from megatron.core.config.losses import LOSSES
from megatron.core.config.mixers import MIXERS
from megatron.core.config.model import TransformerConfig, round_up
from megatron.core.config.norms import NORMALIZATIONS
from megatron.training.config.flags import dashed, flags_of, spelling_table, value_of
from megatron.training.config.problem import Problem, divides, multiples, problems_of, unless_multiple
from megatron.training.config.run_config import RunConfig

VARIANT = "--experimental-attention-variant"
TP = "--tensor-model-parallel-size"


def tensor_parallel(c: RunConfig, world_size: int) -> Iterator[Problem]:
    m, tp = c.model, c.parallel.tensor_model_parallel_size
    yield from unless_multiple("--num-attention-heads", m.num_attention_heads, TP, tp)
    by_heads = m.num_attention_heads > 0 and not m.kv_channels and m.attention_facts.grouped
    step = math.lcm(tp, m.num_attention_heads) if by_heads else tp
    yield from unless_multiple("--hidden-size", m.hidden_size, TP, tp, step)
    if m.group_query_attention and not divides(tp, m.num_query_groups):
        remedy = f"{multiples(m.num_query_groups or 1, tp)}, or a TP size that divides it"
        yield Problem("--num-query-groups", m.num_query_groups, f"must be a multiple of {TP} {tp}", remedy)
    for flag, value in window_heads(c).items():
        yield from unless_multiple(flag, value, TP, tp)
    if m.hidden_size > 0:
        yield from unless_multiple("--ffn-hidden-size", m.ffn_size, TP, tp)
    yield from _widths_by_layer(c, tp)
    yield from _vocabulary(c, tp)


def _widths_by_layer(c: RunConfig, tp: int) -> Iterator[Problem]:
    m, flag = c.model, "--ffn-hidden-size-pattern"
    if m.ffn_hidden_size_pattern is None or m.num_layers < 1:
        return
    try:
        widths = m.ffn_sizes
    except ValueError as error:
        remedy = f"use for example ([1024]*1+[2048]*{m.num_layers - 1})"
        yield Problem(flag, m.ffn_hidden_size_pattern, str(error), remedy)
        return
    wrong = next((layer for layer, width in enumerate(widths) if not divides(tp, width)), None)
    if wrong is not None:
        rule = f"has {widths[wrong]} for layer {wrong}, which must be a multiple of {TP} {tp}"
        yield Problem(flag, m.ffn_hidden_size_pattern, rule, multiples(widths[wrong], tp))


def window_heads(c: RunConfig) -> dict[str, int | None]:
    """Return the head counts of layers with sliding-window or chunked attention, keyed by flag. The value is None for a
    flag that is not given."""
    m = c.model
    return {
        "--window-num-attention-heads": m.window_num_attention_heads,
        "--window-num-query-groups": m.window_num_query_groups,
    }


def _vocabulary(c: RunConfig, tp: int) -> Iterator[Problem]:
    """Check that TP divides the padded vocabulary size. If the vocabulary size is not known yet, check that TP divides
    `make_vocab_size_divisible_by`."""
    divisor, vocabulary = c.model.make_vocab_size_divisible_by, c.model.vocab_size
    if divisor < 1 or tp < 1 or (vocabulary is not None and vocabulary < 1):
        return
    padded, fixed = c.model.padded_vocab_size if vocabulary else divisor, c.model.pad_vocab_size_to
    if fixed is not None and vocabulary is not None:
        if fixed < vocabulary:
            rule = f"must be at least the vocabulary of {vocabulary}"
            yield Problem("--pad-vocab-size-to", fixed, rule, f"nearest: {round_up(vocabulary, math.lcm(128, tp))}")
        else:
            yield from unless_multiple("--pad-vocab-size-to", fixed, TP, tp)
        return
    if padded % tp:
        shown = f"the vocabulary of {vocabulary} padded to {padded}" if vocabulary else "the padded vocabulary"
        rule = f"{shown} must be a multiple of {TP} {tp}"
        yield Problem("--make-vocab-size-divisible-by", divisor, rule, f"nearest: {math.lcm(divisor, tp)}")


def attention(c: RunConfig, world_size: int) -> Iterator[Problem]:
    m = c.model
    heads, groups = m.num_attention_heads, m.num_query_groups
    if m.kv_channels is None and m.attention_facts.grouped and not divides(heads, m.hidden_size):
        tp = c.parallel.tensor_model_parallel_size
        remedy = f"{multiples(m.hidden_size, math.lcm(heads, max(tp, 1)))}, or add --kv-channels"
        yield Problem("--hidden-size", m.hidden_size, f"must be a multiple of --num-attention-heads {heads}", remedy)
    if m.group_query_attention and groups is None:
        remedy = f"add --num-query-groups, a divisor of --num-attention-heads {heads}"
        yield Problem("--group-query-attention", None, "needs --num-query-groups", remedy)
    if m.group_query_attention and not divides(groups, heads):
        rule = f"must divide --num-attention-heads {heads}"
        yield Problem("--num-query-groups", groups, rule, _divisors(heads, groups or 0))
    if not m.group_query_attention and groups not in (None, heads):
        yield Problem.no_effect("--num-query-groups", groups, "--group-query-attention")
    yield from _heads_of_windows(c)
    yield from _activation(m)
    coeff = m.attention_temperature_coeff
    unrotated = m.no_rope_freq is not None or m.attention_temperature_everywhere
    if coeff and m.rotary and not unrotated:
        needed = "--no-rope-freq or --attention-temperature-everywhere"
        yield Problem.no_effect("--attention-temperature-coeff", coeff, needed)
    if not m.bias_gelu_fusion and (m.activation != "gelu" or not m.add_bias_linear):
        yield Problem.no_effect("--no-bias-gelu-fusion", None, "GeLU in a model with biases")


def norms(c: RunConfig, world_size: int) -> Iterator[Problem]:
    m, scope = c.model, c.model.qk_layernorm_scope
    norm = NORMALIZATIONS.facts(m.normalization)
    if m.norm_parameters == "weight" and not norm.biased:
        rule = f"has no effect with --normalization {m.normalization}, because this norm has only a weight"
        yield Problem("--norm-parameters", "weight", rule, "remove it", harmless=True)
    if m.norms_sums and m.parallel_residual:
        why = "the MLP reads the norm of the sum that includes the attention output"
        yield Problem.exclusive("--parallel-residual", None, "--norm-placement sum", why)
    if m.norms_sums and m.mtp_depths:
        why = "its modules end with a norm of their own"
        yield Problem.exclusive(DEPTHS, m.mtp_depths, "--norm-placement sum", why)
    if not m.qk_layernorm or scope == "head":
        return
    if not norm.standard or (scope == "all" and norm.centered):
        rule = f"is {'an' if scope == 'all' else 'a LayerNorm or'} RMSNorm, and --normalization is {m.normalization}"
        yield Problem("--qk-layernorm-scope", scope, rule, "use head, or --normalization RMSNorm")
    if m.norm_parameters == "none":
        why = "its norms have separate weights for each head"
        yield Problem.exclusive("--qk-layernorm-scope", scope, "--norm-parameters none", why)


def _activation(m: TransformerConfig) -> Iterator[Problem]:
    """Check that the flags select only one activation function, and that this function supports the given flags for
    operand bounds."""
    short = ["--" + name.replace("_", "-") for name in m.activation_flags]
    if m.activation_func is not None and short:
        yield Problem.exclusive("--activation-func", m.activation_func, " and ".join(short))
    if len(short) > 1:
        yield Problem.exclusive(short[0], None, " and ".join(short[1:]))
    if ACTIVATIONS.facts(m.activation).bounded:
        return
    bounded = [name for name in ACTIVATIONS if ACTIVATIONS.facts(name).bounded]
    for flag, value, default in (
        ("--activation-func-clamp-value", m.activation_func_clamp_value, None),
        ("--glu-linear-offset", m.glu_linear_offset, 0),
    ):
        if value != default:
            rule = f"is not supported by the activation function {m.activation}"
            yield Problem(flag, value, rule, f"remove it, or use --activation-func {' or '.join(bounded)}")


def _divisors(heads: int, groups: int) -> str:
    """Return a remedy that suggests the two divisors of `heads` that are nearest to `groups`."""
    legal = [n for n in range(1, heads + 1) if heads % n == 0]
    near = sorted(sorted(legal, key=lambda n: abs(n - groups))[:2])
    return f"nearest: {' or '.join(map(str, near))}"


def _heads_of_windows(c: RunConfig) -> Iterator[Problem]:
    """Check the head counts of layers with sliding-window or chunked attention."""
    m, own = c.model, window_heads(c)
    heads = m.window_num_attention_heads or m.num_attention_heads
    groups = m.window_num_query_groups or (m.num_query_groups if m.group_query_attention else None)
    if any(own.values()) and not divides(groups, heads):
        of_windows = m.window_num_query_groups is not None
        flag = "--window-num-query-groups" if of_windows else "--num-query-groups"
        which = "--window-num-attention-heads" if m.window_num_attention_heads else "--num-attention-heads"
        remedy = _divisors(heads, groups or 0) + ("" if of_windows else ", or add --window-num-query-groups")
        yield Problem(flag, groups, f"must divide {which} {heads}", remedy)


def mixers(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Yield the problems found by the rules of the model's attention and linear attention classes."""
    found = [c.model.attention_mixer]
    with suppress(ValueError):  # another rule reports an invalid pattern
        found += (MIXERS.facts(name) for name in c.model.linear_attentions)
    for facts in found:
        if facts.rules is not None:
            yield from problems_of(facts.rules(c, world_size))


def layers(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check the layer patterns, and the flags that each pattern requires."""
    m = c.model
    some_local = m.window_size is not None or m.attention_chunk_size is not None
    if m.num_layers < 1:
        return
    for field, error in m.unreadable_patterns().items():
        yield Problem(dashed(field), getattr(m, field), error, f"use for example 4 or {pattern_of(m.num_layers)}")
    for flag, pattern, present, read, what in (
        ("--window-attn-skip-freq", m.window_attn_skip_freq, some_local, lambda: m.local_pattern, "a window or chunks"),
        ("--no-rope-freq", m.no_rope_freq, m.rotary, lambda: m.rope_pattern, "a rotary embedding"),
    ):
        try:
            if present and not any(read()):
                yield Problem(flag, pattern, f"leaves no layer with {what}", "use another pattern", harmless=True)
        except ValueError as error:
            yield Problem(flag, pattern, str(error), f"use for example 4 or {pattern_of(m.num_layers)}")


def pattern_of(num_layers: int) -> str:
    """Return an example of a layer pattern of 0s and 1s for a model with `num_layers` layers."""
    return f"([0]*{num_layers - num_layers // 2}+[1]*{num_layers // 2})"


def linear_attention(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check the pattern of linear attention layers, and the settings that do not apply to linear attention layers."""
    m = c.model
    flag = "--linear-attention-freq"
    cp = c.parallel.context_parallel_size
    try:
        variants = m.linear_attentions
    except ValueError:
        return  # another rule reports the invalid pattern
    for variant in variants if cp > 1 else ():
        if not MIXERS.facts(variant).whole_sequences:
            why = "a layer of this kind uses only the tokens of its own rank"
            yield Problem.exclusive("--context-parallel-size", cp, f"{VARIANT} {variant}", why)
    if m.num_layers < 1 or not variants or m.pattern is not None:
        return
    try:
        linear = m.linear_pattern
    except ValueError as error:
        yield Problem(flag, m.linear_attention_freq, str(error), f"use for example 4 or {pattern_of(m.num_layers)}")
        return
    if not any(linear):
        rule = "leaves no layer with linear attention"
        yield Problem(flag, m.linear_attention_freq, rule, "use another pattern", harmless=True)
    if all(linear) and not any(MIXERS.facts(variant).attends for variant in variants):
        yield from without_attention(c, "where every layer has linear attention", flag)


def without_attention(c: RunConfig, where: str, flag: str) -> Iterator[Problem]:
    """Report flags that have no effect because no layer uses --attention-module. The remedy names `flag`, which would
    add such layers."""
    for other in flags_of("model"):
        chooses = other.spec.effective == "attention"
        if (chooses or other.field in OF_OTHER_ATTENTION) and (value := value_of(c, other)) != other.default:
            shown, rule = None if value is True else value, f"has no effect {where}"
            yield Problem(other.name, shown, rule, f"remove it, or use {flag}", harmless=True)


OF_OTHER_ATTENTION = (
    *("group_query_attention", "qk_layernorm", "softmax_scale"),
    *("clip_qkv", "add_attention_output_bias", "qk_layernorm_after_rotary"),
    *("attention_output_gate", "add_qkv_bias", "window_size", "attention_chunk_size", "no_rope_freq"),
)
"""Configuration fields that have no effect in layers with linear attention."""


def positions(c: RunConfig, world_size: int) -> Iterator[Problem]:
    m = c.model
    longest = m.max_position_embeddings
    if longest is not None and 0 < longest < m.seq_length:
        rule = f"must be at least --seq-length {m.seq_length}"
        yield Problem("--max-position-embeddings", longest, rule, f"nearest: {m.seq_length}")
    if m.position_embedding_type.startswith("sinusoidal") and (m.hidden_size < 4 or m.hidden_size % 2):
        rule = "must be an even number of at least 4: half of the channels are sines, half cosines"
        yield Problem("--hidden-size", m.hidden_size, rule, f"nearest: {max(4, round_up(m.hidden_size, 2))}")
    if m.rotary:
        yield from _rotated_channels("--rotary-percent", m.rotary_percent, m.kv_channels)
        yield from _rotated_channels("--window-rotary-percent", m.window_rotary_percent, m.kv_channels)
        if m.use_rope_scaling and m.rotary_type == "proportional":
            yield Problem.exclusive("--use-rope-scaling", None, "--rope-type proportional")
        low, high = m.rope_scaling_low_freq_factor, m.rope_scaling_high_freq_factor
        if m.use_rope_scaling and low > high:
            rule = f"must be at most --rope-scaling-high-freq-factor {high}"
            yield Problem("--rope-scaling-low-freq-factor", low, rule, "for example 1 and 4, as in Llama 3.1")


def _rotated_channels(flag: str, percent: float | None, width: int | None) -> Iterator[Problem]:
    """Check that the rotary embedding rotates a positive even number of channels of an attention head. `width` is the
    number of channels of the head."""
    if percent is None or not width or width < 0 or not 0 < percent <= 1:
        return
    rotated = int(width * percent)
    if rotated < 2 or rotated % 2:
        rule = f"rotates {rotated} of the {width} channels of a head; it must be an even number above 0"
        near = max(2, rotated // 2 * 2)
        shown = f"--kv-channels {width + 1}, or " if percent == 1 else ""
        share = f"{near / width:g}"
        if int(width * float(share)) < near:  # rounded down
            share = f"{math.ceil(near / width * 1e6) / 1e6:g}"
        yield Problem(flag, percent, rule, f"nearest: {shown}{share}")


def residual_streams(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Report a problem if flags select two residual streams, or if the layer module adds outputs to the hidden states
    directly and thus bypasses the selected residual stream."""
    module, streams = c.model.layer_module, [RESIDUALS.facts(name) for name in RESIDUALS.wanted(c.model)]
    for facts in streams[1:]:
        value = _value_of_switch(c, facts.switch)
        yield Problem.exclusive(facts.switch, value, streams[0].switch, "a model can have only one residual stream")
    for facts in streams:
        if facts.layers is not None and module not in facts.layers:
            why = "layers of this class may add their outputs to hidden states directly"
            yield Problem.exclusive(facts.switch, _value_of_switch(c, facts.switch), f"--layer-module {module}", why)


def _value_of_switch(c: RunConfig, switch: str) -> object:
    """Return the value that appears after a flag on the command line, or None if the flag takes no value."""
    value: object = value_of(c, spelling_table()[switch][0])
    return None if value is True else value


def yarn(c: RunConfig, world_size: int) -> Iterator[Problem]:
    m = c.model
    if not m.rotary or not m.yarn:
        return
    if m.use_rope_scaling and m.rotary_scaling_factor != 1:
        yield Problem.exclusive("--use-rope-scaling", None, "--rope-type yarn", "both scale the rotary frequencies")
    if m.beta_slow >= m.beta_fast:
        rule = f"must be below --beta-fast {m.beta_fast:g}"
        yield Problem("--beta-slow", m.beta_slow, rule, "for example 1 and 32, as in the paper")
    if m.rotary_base == 1:
        rule = "gives all channel pairs the same frequency, but YaRN needs different frequencies"
        yield Problem("--rotary-base", m.rotary_base, rule, "use 10000")


DEPTHS = "--mtp-num-layers"


def multi_token(c: RunConfig, world_size: int) -> Iterator[Problem]:
    m = c.model
    depths = c.model.mtp_depths
    s = c.model.seq_length
    if depths < 1:
        return
    if 0 < s <= depths:
        rule = f"must be below --seq-length {s}: otherwise, no token of a sample has a label at the last depth"
        yield Problem(DEPTHS, depths, rule, f"nearest: {s - 1}" if s > 1 else "remove it")
    if m.loss_func in LOSSES and not LOSSES.facts(m.loss_func).multi_token:
        rule = f"needs a loss that supports labels of later tokens, which --loss-func {m.loss_func} does not declare"
        remedy = f"remove {DEPTHS}, or register the loss with multi_token=True if it needs only logits and label"
        yield Problem(DEPTHS, depths, rule, remedy)
