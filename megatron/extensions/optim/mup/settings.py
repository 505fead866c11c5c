"""Multipliers of a model under muP and CompleteP, and rules for the muP flags. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import isclose, sqrt

from megatron.core.config.model import TransformerConfig
from megatron.extensions.optim.mup.flags import SWITCH, MupFlags
from megatron.extensions.optim.mup.widths import own_ratios
from megatron.training.config.flags import field_table, with_named
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig

RATED = ("adam", "sgd", "muon")
"""Optimizers for which muP's scaling rules are implemented."""


def multipliers(model: TransformerConfig) -> dict[str, float]:
    """Return a mapping from the names of the multiplier fields that --use-mup sets to the values of these fields."""
    own = model.options(MupFlags)
    width, depth = ratios(model)
    return {
        "embedding_multiplier": own.mup_embedding_mult,
        "logits_scaling": width if own.mup_output_mult == 1 else 1 / own.mup_output_mult,
        "residual_multiplier": 1 / depth,
    }


def ratios(model: TransformerConfig) -> tuple[float, float]:
    """Return two ratios of the model to the base model: the ratio of the widths, and the ratio of the depths."""
    own = model.options(MupFlags)
    width = model.hidden_size / (own.mup_base_hidden_size or model.hidden_size)
    return width, model.num_layers / (own.mup_base_num_layers or model.num_layers)


def with_multipliers(c: RunConfig) -> RunConfig:
    """Set the multipliers, ratios and softmax scale that the user has not set. The function is idempotent."""
    m = c.model
    own = m.options(MupFlags)
    if not own.use_mup:
        return c
    try:
        width, depth = ratios(m)
        given = {name: getattr(m, name) for name in multipliers(m)}
        values: dict[str, float | None] = {
            name: value if given[name] == 1 else given[name] for name, value in multipliers(m).items()
        }
        values["softmax_scale"] = score_factor(m)
        parameters = own_ratios(c) or None
    except (ArithmeticError, AssertionError, TypeError, ValueError):
        # Other flag rules report invalid sizes.
        return c
    usual = MupFlags()
    options = replace(
        own,
        mup_width_mult=width if own.mup_width_mult == usual.mup_width_mult else own.mup_width_mult,
        mup_depth_mult=depth if own.mup_depth_mult == usual.mup_depth_mult else own.mup_depth_mult,
        mup_parameter_widths=own.mup_parameter_widths or parameters,
    )
    return with_named(c.with_options(options), values)


def score_factor(model: TransformerConfig) -> float | None:
    """Return the factor by which attention scores are multiplied under muP. If the user has passed --softmax-scale,
    return the user's value."""
    own = model.options(MupFlags)
    if model.softmax_scale is not None or not any(layer.attends for layer in model.layers):
        return model.softmax_scale
    base = sqrt(own.mup_base_head_dim) if own.mup_base_head_dim is not None else 1.0
    # muP replaces only one factor of `attention_scale`, namely 1 / sqrt(head_dim).
    usual = 1 / sqrt(model.head_dim)
    return float(model.attention_scale / usual * base / model.head_dim**own.mup_attn_scale_power)


def problems(c: RunConfig, world_size: int) -> Iterator[Problem]:
    m, own = c.model, c.model.options(MupFlags)
    if not own.use_mup or min(m.hidden_size or 0, m.num_layers or 0) <= 0:
        return
    try:
        parameters = own_ratios(c) or None
    except ValueError as error:
        yield Problem("--mup-base-widths", " ".join(own.mup_base_widths or ()), str(error), "correct or extend it")
        return
    if own.mup_parameter_widths and own.mup_parameter_widths != parameters:
        given_ones = " ".join(own.mup_parameter_widths)
        rule = "does not match the sizes of the model and the base model"
        yield Problem("--mup-parameter-widths", given_ones, rule, "remove it")
    width, depth = ratios(m)
    for name, value in {"mup_width_mult": width, "mup_depth_mult": depth}.items():
        if not isclose(given := getattr(own, name), value):
            rule = f"must be {value:g} according to the sizes of the model and the base model"
            yield Problem(field_table()[name].name, given, rule, "remove it")
    for name, value in multipliers(m).items():
        if not isclose(given := getattr(m, name), value):
            rule = f"must be {value:g} or omitted with {SWITCH}, which sets it"
            yield Problem(field_table()[name].name, given, rule, "remove it, or see --mup-output-mult and its like")
    if depth != 1 and m.norms_sums:
        rule = "cannot be combined with --norm-placement sum: its norms undo the scaling of sublayer outputs"
        yield Problem("--mup-base-num-layers", own.mup_base_num_layers, rule, "remove it, or use other norms")
    for name in dict.fromkeys((c.optimizer.optimizer, c.optimizer.elementwise)):
        if name not in RATED:
            rule = (
                f"has Adam's learning rate factors under {SWITCH}, even if its updates depend on the size of gradients"
            )
            yield Problem("--optimizer", name, rule, f"use {', '.join(RATED)}, or check it", harmless=True)
