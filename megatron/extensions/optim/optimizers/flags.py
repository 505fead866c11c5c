"""Registers Muon, SOAP, QK-clip, the precision-aware optimizer and settings of named parameters, and defines their
flags.

This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config.flag_spec import Condition, Section, flag
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.optimizers import OPTIMIZERS, STATE_STORES, StatePlan
from megatron.core.config.param_groups import PARAMETER_RULES
from megatron.extensions.optim.optimizers.newton_schulz import COEFFICIENTS
from megatron.training.extensions import CALLBACKS, extension_flags

HERE = "megatron.extensions.optim.optimizers"

SCALE_BLOCK = 64
"""Number of consecutive elements of an optimizer state that share a scale. In the parameter buffers, parameters and
shards start at multiples of this number."""

SWITCH = "--use-precision-aware-optimizer"
STATE_DTYPES = ("fp32", "bf16", "fp16", "fp8")
"""Number formats in which Adam's moments can be stored."""


@extension_flags("Muon", may_change=True, rules=f"{HERE}.rules:muon")
@dataclass(frozen=True)
class MuonFlags:
    """--optimizer muon: orthogonalized momentum for the matrices of hidden layers, and --muon-scalar-optimizer for
    embeddings, output layer, norms and biases."""

    NO_EFFECT_WITHOUT: ClassVar = Condition(
        "--optimizer muon",
        lambda config: "muon_scalar_optimizer" in OPTIMIZERS.facts(config.optimizer.optimizer).fields,
    )

    muon_momentum: float = flag(0.9, at_least=0, below=1)
    """Muon: decay of the momentum. The momentum is a moving average of the gradients."""

    muon_nesterov: bool = flag(False, "--muon-use-nesterov")
    """Muon: orthogonalize Nesterov's look-ahead, the average of momentum and gradient, instead of the momentum."""

    muon_scale_mode: str = flag("spectral", choices=("spectral", "unit_rms_norm", "shape_scaling"))
    """Muon: scale factor of the update of a matrix [out, in]: spectral is sqrt(max(out, in)), unit_rms_norm is
    sqrt(out / in), and shape_scaling is max(1, sqrt(out / in))."""

    muon_extra_scale_factor: float = flag(1.0, above=0)
    """Muon: additional scale factor of the update. 0.2 with the spectral scale makes updates as large as Adam's
    (arXiv 2502.16982)."""

    muon_num_ns_steps: int = flag(5, above=0)
    """Muon: steps of the Newton-Schulz iteration."""

    muon_coefficient_type: str = flag("quintic", choices=tuple(COEFFICIENTS))
    """Muon: coefficients of the Newton-Schulz iteration."""

    muon_fp32_matmul_prec: str = flag("medium", choices=("medium", "high", "highest"))
    """Muon: precision of the Newton-Schulz iteration for fp32 momentum: bfloat16, TF32 where the device supports it,
    or fp32."""

    muon_tp_mode: str = flag("duplicated", choices=("duplicated", "blockwise"))
    """Muon: orthogonalize whole matrices (duplicated), or each tensor-parallel shard separately (blockwise). With
    blockwise, results depend on the tensor-parallel size."""

    muon_split_qkv: bool = flag(True, name="--muon-no-split-qkv")
    """Muon: orthogonalize queries, keys and values as one matrix."""

    muon_split_gate_up: bool = flag(True, name="--muon-no-split-gate-up")
    """Muon: orthogonalize the gate and up projections of a gated MLP as one matrix, as in Megatron-LM."""

    muon_scalar_optimizer: str = flag("adam", choices=OPTIMIZERS)
    """Muon: optimizer for all parameters other than the matrices of hidden layers."""

    moe_router_skip_muon: bool = flag(False, no_effect_without="--num-experts")
    """Muon: update the router weight with --muon-scalar-optimizer."""


@extension_flags("SOAP", may_change=True)
@dataclass(frozen=True)
class SoapFlags:
    """--optimizer soap: Adam in the eigenbasis of Shampoo's factors, for the matrices of hidden layers; Adam for
    embeddings, output layer, norms and biases. SOAP and Adam both use --adam-beta1, --adam-beta2 and --adam-eps."""

    NO_EFFECT_WITHOUT: ClassVar = Condition("--optimizer soap", lambda config: config.optimizer.optimizer == "soap")

    soap_precondition_frequency: int = flag(10, above=0)
    """SOAP: number of optimizer updates between two steps of the power iteration. The power iteration updates the bases
    from the factors."""

    soap_shampoo_beta: float | None = flag(None, at_least=0, below=1)
    """SOAP: decay of the factors, which are moving averages of gradient products; default: --adam-beta2."""

    soap_max_precondition_dim: int = flag(10_000, above=0)
    """SOAP: largest matrix dimension for which a factor is computed. Dimensions larger than this number are not
    rotated."""


@extension_flags("QK-clip", may_change=True, rules=f"{HERE}.rules:qk_clip", resolve=f"{HERE}.rules:with_max_logits")
@dataclass(frozen=True)
class QKClipFlags:
    qk_clip: bool = flag(
        False,
        excludes=(
            "--position-embedding-type alibi: scaling queries and keys does not scale its biases",
            "--attn-logit-softcapping: logits are already bounded",
            "--clip-qkv: queries and keys are already bounded",
            "--use-precision-aware-optimizer: main parameters are scaled in fp32",
            "--cuda-graph-impl local",
            "--optimizer-cpu-offload: main parameters are scaled on the device, after the update",
            "--optimizer-post-validation: the step's largest logits are no longer available when it is repeated",
        ),
    )
    """QK-clip (MuonClip, Kimi K2): after an update, scale down the query and key projections of each head whose
    largest attention logit in the step exceeded --qk-clip-threshold. QK-clip requires attention in plain torch."""

    qk_clip_threshold: float = flag(100.0, above=0, no_effect_without="--qk-clip")
    """--qk-clip: heads whose largest attention logit exceeds this value are clipped."""

    qk_clip_alpha: float = flag(0.5, at_least=0, at_most=1, no_effect_without="--qk-clip")
    """--qk-clip: exponent of the clip factor for queries; keys are scaled by the remaining power."""


@extension_flags("precision-aware optimizer", may_change=True, rules=f"{HERE}.rules:precision_aware")
@dataclass(frozen=True)
class PrecisionAwareFlags:
    use_precision_aware_optimizer: bool = flag(
        False, excludes="--optimizer-post-validation: its rollback copies support only states in the main dtype"
    )
    """Adam: store gradients, main parameters and moments in the formats of --main-grads-dtype, --main-params-dtype,
    --exp-avg-dtype and --exp-avg-sq-dtype."""

    main_grads_dtype: str = flag("fp32", choices=("fp32", "bf16"), needs=SWITCH)
    """--use-precision-aware-optimizer: format in which gradients are summed over micro-batches. Stochastic rounding
    keeps the sums unbiased."""

    main_params_dtype: str = flag("fp32", choices=("fp32", "fp16"), needs=SWITCH)
    """--use-precision-aware-optimizer: format of main parameters; fp16 has a scale for each block of 64 elements."""

    exp_avg_dtype: str = flag("fp32", choices=STATE_DTYPES, needs=SWITCH)
    """--use-precision-aware-optimizer: format of Adam's first moment; fp16 and fp8 (e4m3) have a scale for each block
    of 64 elements."""

    exp_avg_sq_dtype: str = flag("fp32", choices=STATE_DTYPES, needs=SWITCH)
    """--use-precision-aware-optimizer: format of Adam's second moment; fp16 and fp8 store the square root of the
    moment, with a scale for each block of 64 elements."""

    store_param_remainders: bool = flag(True, name="--no-store-param-remainders", no_effect_without=SWITCH)
    """--use-precision-aware-optimizer: store complete fp32 main parameters instead of the 16 low bits that bf16
    parameters lack."""


@extension_flags("named parameters", may_change=True, rules=f"{HERE}.named_parameters:rules", part_of="optimizer")
@dataclass(frozen=True)
class NamedParameterFlags:
    """Settings of parameters selected by name."""

    param_group: tuple[str, ...] | None = flag(None, repeats=True)
    """'REGEX key=value ...': learning rate and weight decay of the parameters whose names match the regular expression.
    Keys: lr_mult (factor of the learning rate), wd_mult (factor of the weight decay), weight_decay (replaces the weight
    decay). The flag may be repeated; if several expressions match, the last expression takes precedence."""

    freeze: tuple[str, ...] | None = flag(None, repeats=True, chooses_trained=True)
    """Freeze the parameters whose names match this regular expression. The flag may be repeated."""


def whole_roles(optimizer: OptimizerConfig) -> frozenset[str]:
    """Return the roles of the matrices that Muon updates."""
    routers = frozenset() if optimizer.options(MuonFlags).moe_router_skip_muon else frozenset({"router"})
    return frozenset({"hidden", "gate"}) | routers


def product_dtypes(optimizer: OptimizerConfig, main_dtype: str) -> tuple[str, ...]:
    """Return the dtype in which Muon communicates and orthogonalizes matrices, as a tuple with one element.
    `main_dtype` is the dtype of main parameters."""
    medium = optimizer.options(MuonFlags).muon_fp32_matmul_prec == "medium"
    return ("bfloat16" if main_dtype == "float32" and medium else main_dtype,)


class PackedPlan(StatePlan):
    """State plan for optimizer states in the formats of --main-params-dtype, --exp-avg-dtype and --exp-avg-sq-dtype."""

    def holds(self, optimizer: Section) -> bool:
        return optimizer.options(PrecisionAwareFlags).use_precision_aware_optimizer

    def main_kind(self, optimizer: Section, params_dtype: str, main_dtype: str, on_host: bool = False) -> str:
        """Return how main parameters are stored. There are two kinds of storage in addition to the kinds of the base
        class. "fp16" stores fp16 numbers and scales. "remainders", which is only used on the device, stores the lower
        16 bits, because bf16 parameters contain the upper 16 bits."""
        options = optimizer.options(PrecisionAwareFlags)
        plain = super().main_kind(optimizer, params_dtype, main_dtype, on_host)
        if plain == "aliased" or options.main_params_dtype == "fp16":
            return "aliased" if plain == "aliased" else "fp16"
        remainders = options.store_param_remainders and params_dtype == "bfloat16" and not on_host
        return "remainders" if remainders else plain

    def main_bytes(self, numel: int, kind: str, main: int) -> int:
        if kind == "fp16":
            return numel * 2 + numel // SCALE_BLOCK
        return numel * 2 if kind == "remainders" else super().main_bytes(numel, kind, main)

    def gradients_dtype(self, optimizer: Section) -> str | None:
        return "bfloat16" if optimizer.options(PrecisionAwareFlags).main_grads_dtype == "bf16" else None

    def described(self, optimizer: Section, params_dtype: str, main_dtype: str) -> str:
        kind, options = self.main_kind(optimizer, params_dtype, main_dtype), optimizer.options(PrecisionAwareFlags)
        moments = f"exp_avg {options.exp_avg_dtype}, exp_avg_sq {options.exp_avg_sq_dtype}"
        return f"main parameters {kind}, {moments}"


OPTIMIZERS.register(
    "muon",
    f"{HERE}.muon:muon",
    whole_roles=whole_roles,
    others=lambda optimizer: optimizer.options(MuonFlags).muon_scalar_optimizer,
    fields=("muon_scalar_optimizer", "moe_router_skip_muon"),
    product_dtypes=product_dtypes,
)
OPTIMIZERS.register(
    "soap",
    f"{HERE}.soap:soap",
    whole_roles=lambda optimizer: frozenset({"hidden", "gate", "router"}),
    others=lambda optimizer: "adam",
)
OPTIMIZERS.substitute(
    "adam",
    f"{HERE}.precision_aware:packed_adam",
    when=lambda optimizer, meta: optimizer.options(PrecisionAwareFlags).use_precision_aware_optimizer,
)
STATE_STORES.register("precision_aware", f"{HERE}.precision_aware:PackedShard", plan=PackedPlan())
PARAMETER_RULES.register(
    "by name",
    f"{HERE}.named_parameters:NamedParameters",
    when=lambda optimizer: optimizer.options(NamedParameterFlags) != NamedParameterFlags(),
)
CALLBACKS.register("qk_clip", f"{HERE}.qk_clip:ClipsLogits", when=lambda c: c.options(QKClipFlags).qk_clip)
