"""Configuration of the optimizer, the learning-rate schedule and the loss scale. This module does not import torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron.core.config.flag_spec import Section, flag
from megatron.core.config.optimizers import LR_SCHEDULES, OPTIMIZERS, STATE_STORES, StatePlan
from megatron.core.config.parallel import HOST_MEMORY
from megatron.core.config.param_groups import PARAMETER_RULES, ParameterRule, ParamGroup
from megatron.core.param_meta import ParamMeta

DECAYING = ("matrices", "embeddings", "norms", "biases")
"""Kinds of parameters (`ParamMeta.kind`) that weight decay can act on."""


DECOUPLED = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Parameters to which --decoupled-lr applies."""


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """The optimizer, its learning rate and its loss scale."""

    optimizer: str = flag("adam", choices=OPTIMIZERS)
    """Adam with decoupled weight decay (AdamW), SGD with momentum, or an optimizer of an extension."""

    lr: float | None = flag(None, "--learning-rate", first_run=True)
    """Peak learning rate."""

    min_lr: float = flag(0.0, first_run=True)
    """Learning rate at the end of the decay."""

    decoupled_lr: float | None = None
    """Peak learning rate of the word embedding and the output layer; default: --lr."""

    decoupled_min_lr: float | None = flag(None, at_least=0, no_effect_without="--decoupled-lr")
    """Learning rate of the word embedding and the output layer at the end of the decay; default: --min-lr."""

    lr_decay_style: str = flag("linear", choices=LR_SCHEDULES, first_run=True)
    """Shape of the learning-rate decay after warm-up."""

    lr_decay_iters: int | None = None
    """Iteration at which the decay ends; default: train-iters."""

    lr_decay_samples: int | None = flag(None, same_setting_as="lr_decay_iters")
    """Consumed samples at which the decay ends; default: train-samples."""

    lr_decay_tokens: int | None = flag(None, same_setting_as="lr_decay_iters")
    """Consumed tokens at which the decay ends; replaces --lr-decay-iters and --lr-decay-samples."""

    lr_warmup_iters: int = flag(0, first_run=True)
    """Iterations of linear warm-up."""

    lr_warmup_samples: int = flag(0, same_setting_as="lr_warmup_iters")
    """Samples of linear warm-up."""

    lr_warmup_tokens: int | None = flag(None, same_setting_as="lr_warmup_iters")
    """Tokens of linear warm-up; replaces --lr-warmup-iters and --lr-warmup-samples."""

    lr_warmup_fraction: float | None = flag(
        None,
        at_least=0,
        below=1,
        excludes=("--lr-warmup-iters", "--lr-warmup-samples"),
        same_setting_as="lr_warmup_iters",
    )
    """Length of the warm-up as a fraction of the decay length."""

    lr_warmup_init: float = 0.0
    """Learning rate at the start of warm-up."""

    lr_wsd_decay_style: str = flag("exponential", choices=("exponential", "linear", "cosine", "minus_sqrt"))
    """WSD: shape of the learning-rate curve in the final annealing phase."""

    lr_wsd_decay_iters: int | None = flag(None, at_least=0, no_effect_without="--lr-decay-style WSD")
    """WSD: length of the final annealing phase in iterations; 0 for no annealing."""

    lr_wsd_decay_samples: int | None = flag(
        None, at_least=0, no_effect_without="--lr-decay-style WSD", same_setting_as="lr_wsd_decay_iters"
    )
    """WSD: length of the final annealing phase in samples."""

    lr_wsd_decay_fraction: float | None = flag(
        None,
        at_least=0,
        at_most=1,
        no_effect_without="--lr-decay-style WSD",
        excludes=("--lr-wsd-decay-iters", "--lr-wsd-decay-samples"),
        same_setting_as="lr_wsd_decay_iters",
    )
    """WSD: length of the final annealing phase as a fraction of the decay length, such as 0.2 for the last 20 %."""

    weight_decay: float = flag(0.01, at_least=0, first_run=True)
    """Decoupled weight decay of the parameters of --weight-decay-on."""

    weight_decay_on: tuple[str, ...] = flag(("matrices", "embeddings"), many=True, choices=DECAYING)
    """Kinds of parameters to which weight decay applies. Vectors that are neither norm weights nor biases, such as
    attention sinks, count as biases. The weight of the output layer belongs to "matrices", not to "embeddings"."""

    apply_wd_to_qk_layernorm: bool = False
    """Apply weight decay to the norms of queries and keys, too."""

    start_weight_decay: float | None = flag(None, at_least=0)
    """Weight decay at the first step; default: weight-decay."""

    end_weight_decay: float | None = flag(None, at_least=0)
    """Weight decay at the last step; default: weight-decay."""

    weight_decay_incr_style: str = flag("constant", choices=("constant", "linear", "cosine"))
    """Schedule of the weight decay from --start-weight-decay to --end-weight-decay."""

    adam_beta1: float = flag(0.9, at_least=0, below=1)
    """Decay of the first moment."""

    adam_beta2: float = flag(0.999, at_least=0, below=1)
    """Decay of the second moment."""

    adam_eps: float = 1e-8
    """Epsilon added to the square root of the second moment."""

    sgd_momentum: float = flag(0.9, at_least=0, below=1)
    """Momentum of SGD."""

    clip_grad: float = flag(1.0, at_least=0, first_run=True)
    """Clip gradients to this global norm; 0 turns clipping off."""

    loss_scale: float | None = flag(None, no_effect_without="--fp16")
    """fp16: fixed loss scale that replaces the dynamic loss scale."""

    initial_loss_scale: float = 2.0**32
    """fp16: first value of the dynamic loss scale."""

    min_loss_scale: float = 1.0
    """fp16: minimum of the dynamic loss scale."""

    loss_scale_window: int = 1000
    """fp16: consecutive steps without overflow after which the loss scale doubles."""

    hysteresis: int = 2
    """fp16: number of steps with overflow after which the loss scale is halved."""

    use_distributed_optimizer: bool = True
    """Shard optimizer state over the data-parallel ranks (ZeRO-1)."""

    @property
    def has_anneal(self) -> bool:
        """True if a flag sets the length of the final annealing phase of the WSD (warmup-stable-decay) schedule."""
        stated = self.lr_wsd_decay_iters, self.lr_wsd_decay_samples, self.lr_wsd_decay_fraction
        return stated != (None, None, None)

    @property
    def whole_roles(self) -> frozenset[str]:
        """Roles (`ParamMeta.role`) of the matrices that the optimizer can only update as whole matrices, not element by
        element. The set is empty for most optimizers."""
        return OPTIMIZERS.facts(self.optimizer).whole_roles(self)

    @property
    def elementwise(self) -> str:
        """Name of the optimizer for all parameters that are updated element by element."""
        others = OPTIMIZERS.facts(self.optimizer).others
        return self.optimizer if others is None else others(self)

    @property
    def updates_together(self) -> bool:
        """True if all ranks of a pipeline stage take part in updating each parameter, so that they must call the update
        together."""
        return not all(OPTIMIZERS.facts(name).by_element for name in (self.optimizer, self.elementwise))

    @property
    def state_store(self) -> str:
        """Name of the state store: the last store in STATE_STORES that applies to this configuration."""
        return [name for name in STATE_STORES if STATE_STORES.facts(name).holds(self)][-1]

    @property
    def state_plan(self) -> StatePlan:
        """Plan that describes how optimizer states are stored."""
        return STATE_STORES.facts(self.state_store)

    @property
    def gradients_dtype(self) -> str | None:
        """Dtype in which gradients are summed over micro-batches; None for the main dtype."""
        return self.state_plan.gradients_dtype(self)

    @property
    def host_fraction(self) -> float:
        """Fraction of the optimizer states that is kept in host memory."""
        return 0.0 if self.host_store is None else HOST_MEMORY.facts(self.host_store).fraction(self)

    @property
    def host_store(self) -> str | None:
        """Name of the store in `HOST_MEMORY` that keeps optimizer states in host memory; None if all states are on the
        device."""
        return next((name for name in HOST_MEMORY if HOST_MEMORY.facts(name).fraction(self) > 0), None)

    def host_ranges(self, owned: Mapping[tuple[int, int], int]) -> Mapping[tuple[int, int], Sequence[range]]:
        """Return the ranges of a rank's elements whose states are in host memory, keyed by bucket (see
        `HostFacts.ranges`)."""
        return {} if self.host_store is None else HOST_MEMORY.facts(self.host_store).ranges(self, owned)

    def host_slots(self, sizes: Sequence[int]) -> tuple[int, int]:
        """Return the number and the size of the device slots. These device buffers hold gradients and parameters while
        they are copied between the device and host memory (see `HostFacts.slots`)."""
        return (0, 0) if self.host_store is None else HOST_MEMORY.facts(self.host_store).slots(sizes)

    @cached_property
    def parameter_rules(self) -> list[ParameterRule]:
        """Parameter rules in the order in which they apply."""
        return [PARAMETER_RULES[name](self) for name in PARAMETER_RULES.wanted(self)]

    def check_rules(self, metas: Collection[ParamMeta]) -> None:
        """Raise ValueError if a parameter rule is not suitable for the model. `metas` describes all parameters of the
        model."""
        if errors := [error for rule in self.parameter_rules for error in rule.errors(metas)]:
            raise ValueError("\n".join(errors))

    @property
    def has_own_groups(self) -> bool:
        """True if the parameter groups differ from the two default groups, one with and one without weight decay."""
        usual = OptimizerConfig()
        fields = ("weight_decay_on", "apply_wd_to_qk_layernorm", "decoupled_lr")
        own = any(getattr(self, name) != getattr(usual, name) for name in fields)
        return own or any(rule.groups for rule in self.parameter_rules)

    def group_of(self, meta: ParamMeta) -> ParamGroup:
        """Return the group of a parameter, which determines the learning rate and the weight decay of the parameter."""
        of_head_norm = self.apply_wd_to_qk_layernorm and (".q_layernorm." in meta.name or ".k_layernorm." in meta.name)
        decays = meta.kind in self.weight_decay_on or of_head_norm
        decoupled = self.decoupled_lr is not None and meta.name in DECOUPLED
        group = ParamGroup(wd_mult=float(decays), decoupled=decoupled)
        for rule in self.parameter_rules:
            group = rule.group(group, meta)
        return group

    @property
    def decoupled(self) -> OptimizerConfig | None:
        """Copy of this configuration with the learning rates of --decoupled-lr and --decoupled-min-lr; None if
        --decoupled-lr is not given."""
        if self.decoupled_lr is None:
            return None
        least = self.min_lr if self.decoupled_min_lr is None else self.decoupled_min_lr
        return replace(self, lr=self.decoupled_lr, min_lr=least, decoupled_lr=None, decoupled_min_lr=None)

    def freezes(self, meta: ParamMeta) -> bool:
        """Return whether a parameter is frozen."""
        return any(rule.freezes(meta) for rule in self.parameter_rules)
