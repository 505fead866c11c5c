"""Widths of the base model, and the ratios of each parameter's input and output sizes to the base model.

By default, all widths grow in proportion to the hidden size. --mup-base-widths lists widths that grow by a different
ratio, such as an expert width that stays constant while the hidden size grows. If a width of a matrix is in
--mup-base-widths, the factors of this matrix are computed from its shapes in both models. Table 8 of arXiv 2203.03466
likewise uses the fan-in of each matrix. Only `own_ratios` imports torch, and only if some parameters may have ratios
that differ from the default.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from fractions import Fraction
from math import prod

from megatron.core.param_meta import ParamMeta
from megatron.extensions.optim.mup.factors import Widths, usual_widths
from megatron.extensions.optim.mup.flags import MupFlags
from megatron.training.config.flags import named_value, with_named
from megatron.training.config.run_config import RunConfig

WIDTHS = (
    *("hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "moe_ffn_hidden_size"),
    *("moe_shared_expert_intermediate_size", "moe_latent_size", "q_lora_rank", "kv_lora_rank", "mamba_num_heads"),
    *("linear_num_key_heads", "linear_num_value_heads", "kda_num_heads", "rg_lru_width", "rg_lru_num_blocks"),
    *("mamba1_channels", "mamba1_step_rank", "window_num_attention_heads", "window_num_query_groups"),
)
"""Configuration fields with widths that by default grow with the hidden size. Fields that the user has not set are not
scaled."""

CHANNELS = ("kv_channels", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
"""Configuration fields with head widths, which by default do not grow with the hidden size."""


def given_widths(options: MupFlags) -> dict[str, int]:
    """Parse --mup-base-widths. Return a mapping from configuration fields to their values in the base model. Raise
    ValueError if an entry is not NAME=NUMBER."""
    found = {}
    for entry in options.mup_base_widths or ():
        name, _, value = entry.partition("=")
        field = name.strip("-").replace("-", "_")
        if field not in (*WIDTHS[1:], *CHANNELS) or not value.isdigit() or int(value) <= 0:
            known = ", ".join(name.replace("_", "-") for name in (*WIDTHS[1:], *CHANNELS))
            raise ValueError(f"must be NAME=NUMBER with one of {known}")
        found[field] = int(value)
    return found


def scaled_widths(c: RunConfig, hidden_size: int) -> dict[str, Fraction]:
    """Scale the model's width fields in proportion to a different hidden size. Return a mapping from field names to
    scaled values. Fields that are not set and fields in --mup-base-widths are omitted."""
    stay = given_widths(c.model.options(MupFlags))
    values = {field: named_value(c, field) for field in WIDTHS if field not in stay}
    return {
        field: Fraction(now * hidden_size, c.model.hidden_size) for field, now in values.items() if type(now) is int
    }


def base_sizes(c: RunConfig) -> dict[str, int]:
    """Return a mapping from configuration fields with widths to their values in the base model. Raise ValueError if a
    width of the base model would not be an integer."""
    own = c.model.options(MupFlags)
    shrink = Fraction(own.mup_base_hidden_size or c.model.hidden_size, c.model.hidden_size)
    given, sizes = given_widths(own), dict[str, int]()
    for field in WIDTHS:
        now = named_value(c, field)
        if field in given or not isinstance(now, int):
            continue
        size = now * shrink
        if size.denominator != 1:
            name = field.replace("_", "-")
            raise ValueError(f"must have {name}=NUMBER: {shrink} of its {now} in this model is not a whole number")
        sizes[field] = int(size)
    return sizes | given


def own_ratios(c: RunConfig) -> tuple[str, ...]:
    """Return an entry NAME=INPUTS,OUTPUTS for each parameter whose size ratios differ from the result of
    `usual_widths`.

    INPUTS and OUTPUTS are the ratios of the parameter's input and output sizes to the base model. NAME contains no
    layer number, because an entry applies to all layers. Raise ValueError in the same cases as `base_sizes`."""
    own = c.model.options(MupFlags)
    # With --q-lora-rank, `q_layernorm` is the norm of the query latent, whose width grows with the hidden size.
    # Otherwise, `q_layernorm` is a norm over single heads, whose width is constant.
    latent = named_value(c, "q_lora_rank") is not None
    if not (own.mup_base_widths or latent):
        return ()
    try:
        base = with_named(c, base_sizes(c)).model
    except ValueError:
        if own.mup_base_widths:
            raise
        return ()
    from megatron.core.pipeline_parallel.stage_parameters import stage_metas  # imports torch

    width = c.model.hidden_size / base.hidden_size
    before = {meta.name: meta for meta in stage_metas(base)}
    found = {}
    for meta in stage_metas(c.model):
        ratios = _ratios(meta, before[meta.name])
        if meta.role not in ("embedding", "output") and ratios != usual_widths(meta, width):
            found[kind_of(meta.name)] = f"{kind_of(meta.name)}={ratios.inputs!r},{ratios.outputs!r}"
    return tuple(found.values())


def _ratios(meta: ParamMeta, base: ParamMeta) -> Widths:
    if meta.width_kind == "vector":
        return Widths(1.0, prod(meta.global_shape) / prod(base.global_shape))
    return Widths(meta.fan_in / base.fan_in, meta.fan_out / base.fan_out)


def read_ratios(entries: Collection[str] | None) -> Mapping[str, Widths]:
    """Parse the entries that `own_ratios` returns into a mapping from parameter names to size ratios."""
    split = [entry.partition("=") for entry in entries or ()]
    return {name: Widths(*map(float, ratios.split(","))) for name, _, ratios in split}


def kind_of(name: str) -> str:
    """Return a parameter's name without layer numbers."""
    return re.sub(r"\.\d+\.", ".", name)
