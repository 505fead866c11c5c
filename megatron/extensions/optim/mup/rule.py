"""Applies muP and CompleteP to initial values and parameter groups, and reports the factors.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.param_groups import ParameterRule, ParamGroup
from megatron.core.param_meta import Init, ParamMeta
from megatron.extensions.optim.mup.factors import Factors, factors, rate
from megatron.extensions.optim.mup.flags import MupFlags
from megatron.extensions.optim.mup.widths import kind_of, read_ratios
from megatron.extensions.optim.optimizers.flags import MuonFlags


class MupRule(ParameterRule):
    """Parameter rule that applies the factors from `factors.py`."""

    def __init__(self, optimizer: OptimizerConfig) -> None:
        self.optimizer, self.options = optimizer, optimizer.options(MupFlags)
        self.own = read_ratios(self.options.mup_parameter_widths)
        self.scale = optimizer.options(MuonFlags).muon_scale_mode

    def factors(self, meta: ParamMeta) -> Factors:
        own = self.own.get(kind_of(meta.name))
        return factors(meta, self.options.mup_width_mult, self.options.mup_depth_mult, own)

    def group(self, group: ParamGroup, meta: ParamMeta) -> ParamGroup:
        """Multiply the learning rate, epsilon and weight decay of `group` by the factors of the parameter.

        A learning rate or weight decay that a flag sets specifically for these parameters is not changed.
        """
        found = self.factors(meta)
        whole = meta.role in self.optimizer.whole_roles
        by = self.optimizer.optimizer if whole else self.optimizer.elementwise
        # Muon and SGD have no epsilon.
        eps = 1.0 if by in ("muon", "sgd") else found.gradient
        lr = 1.0 if group.decoupled else rate(found, by, self.scale if by == "muon" else None)
        return replace(
            group,
            lr_mult=group.lr_mult * lr,
            eps_mult=group.eps_mult * eps,
            wd_mult=group.wd_mult / lr,
        )

    def initial(self, meta: ParamMeta, init: Init) -> Init:
        """Return `init` with the standard deviation multiplied by the parameter's factor.

        If the module defines a special initialization for the parameter, `init` is returned unchanged, because such an
        initialization already depends on the module's widths.
        """
        std = self.factors(meta).std
        if meta.init is not None or std == 1:
            return init
        return replace(init, std=init.std * std)

    def lines(self, metas: Collection[ParamMeta]) -> Iterator[str]:
        """Yield a log line with the multipliers of the model, and log lines with the factors of each parameter role. If
        parameters of the same role have different factors, there is one line for each set of factors."""
        own = self.options
        logits = own.mup_output_mult if own.mup_output_mult != 1 else 1 / own.mup_width_mult
        base = "" if own.mup_base_head_dim is None else f"sqrt({own.mup_base_head_dim:g}) "
        yield (
            f"muP: {own.mup_width_mult:g} times as wide as the base model, {own.mup_depth_mult:g} times as deep; "
            f"embeddings x {own.mup_embedding_mult:g}, logits x {logits:g}, sublayers x {1 / own.mup_depth_mult:g}, "
            f"attention scores {'x ' + base if base else ''}/ channels^{own.mup_attn_scale_power:g}"
        )
        rows: dict[tuple[str, str], list[ParamMeta]] = {}
        for meta in metas:
            rows.setdefault((meta.role, self._row(meta)), []).append(meta)
        for role, row in sorted(rows):
            members = rows[role, row]
            elements = sum(meta.numel for meta in members)
            yield f"muP, {role}: {row}; {len(members)} parameters, {elements:,} elements"

    def _row(self, meta: ParamMeta) -> str:
        """Return the part of a log line that lists a parameter's factors. A factor of 1 means the same value as without
        muP."""
        group = self.group(ParamGroup(wd_mult=1.0), meta)
        std = self.factors(meta).std if meta.init is None or meta.init.std else 1.0
        return (
            f"initial values x {std:g}, lr x {group.lr_mult:g}, epsilon x {group.eps_mult:g}, "
            f"weight decay x {group.wd_mult:g}"
        )
