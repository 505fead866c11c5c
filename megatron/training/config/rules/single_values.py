"""Rules of single flags: required values and ranges of numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from megatron.core.config.param_groups import group_rule
from megatron.training.config.flags import EXTENSION_SECTIONS, Flag, all_flags, value_of
from megatron.training.config.problem import NO_URL, Problem
from megatron.training.config.run_config import RunConfig

REQUIRED = {
    "num_layers": "give --num-layers N, the number of transformer layers",
    "hidden_size": "give --hidden-size N, the width of the model",
    "num_attention_heads": "give --num-attention-heads N, the number of attention heads",
    "seq_length": "give --seq-length N, the number of tokens in a sample",
}
"""Whole numbers above 0 without a default, which is 0 here -> what to do where one is missing or wrong."""

MAY_BE_ZERO = {
    "clip_grad",
    "decoupled_min_lr",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "end_weight_decay",
    "eval_iters",
    "eval_tasks_interval",
    "eval_tasks_num_fewshot",
    "exit_duration_in_mins",
    "exit_interval",
    "exit_margin_in_mins",
    "host_heartbeat_timeout_seconds",
    "init_method_std",
    "layer_growth_threshold",
    "lr_wsd_decay_iters",
    "lr_wsd_decay_samples",
    "moe_aux_loss_coeff",
    "mtp_loss_scaling_factor",
    "mtp_num_layers",
    "num_layers_at_end_in_bf16",
    "num_layers_at_start_in_bf16",
    "num_workers",
    "profile_ranks",
    "profile_step_start",
    "save_interval",
    "start_weight_decay",
    "trace_step_start",
    "weight_decay",
}
"""Numbers that may be 0, in addition to those with default 0. Others must be above 0 unless they have a range."""

RANGES: dict[str, tuple[float, float, str]] = {
    "attention_dropout": (0.0, math.nextafter(1.0, 0.0), "in [0, 1)"),
    "hidden_dropout": (0.0, math.nextafter(1.0, 0.0), "in [0, 1)"),
    "adam_beta1": (0.0, math.nextafter(1.0, 0.0), "in [0, 1)"),
    "adam_beta2": (0.0, math.nextafter(1.0, 0.0), "in [0, 1)"),
    "muon_momentum": (0.0, math.nextafter(1.0, 0.0), "in [0, 1)"),
    "optimizer_offload_fraction": (0.0, 1.0, "in [0, 1]"),
    "qk_clip_alpha": (0.0, 1.0, "in [0, 1]"),
    "sgd_momentum": (0.0, math.nextafter(1.0, 0.0), "in [0, 1)"),
    "fp8_margin": (0, 16, "in [0, 16], as e4m3 has 18 powers of two"),
    "fim_rate": (0.0, 1.0, "in [0, 1]"),
    "fim_spm_rate": (0.0, 1.0, "in [0, 1]"),
    "fim_fragment_rate": (0.0, 1.0, "in [0, 1]"),
    "rotary_scaling_factor": (1.0, math.inf, "at least 1"),
    "window_rotary_percent": (math.nextafter(0.0, 1.0), 1.0, "in (0, 1]"),
    "rotary_percent": (math.nextafter(0.0, 1.0), 1.0, "in (0, 1]"),
    "lr_warmup_fraction": (0.0, math.nextafter(1.0, 0.0), "in [0, 1)"),
    "seed": (0, 2**32 - 1, "in [0, 2^32 - 1]"),
    "spiky_loss_factor": (math.nextafter(1.0, 2.0), math.inf, "above 1"),
    "large_grads_factor": (math.nextafter(1.0, 2.0), math.inf, "above 1"),
}


def single_values(config: RunConfig) -> Iterator[Problem]:
    """Checks each value on its own."""
    for flag in all_flags():
        value = value_of(config, flag)
        if flag.field in REQUIRED:
            if value < 1:
                given = value != 0 or flag.field in dict(config.given)
                rule = "must be at least 1" if given else "is required, and must be at least 1"
                yield Problem(flag.name, value if given else None, rule, REQUIRED[flag.field])
        elif flag.kind in (int, float) and value is not None:
            values = value if flag.takes_several else (value,)
            broken = next(filter(None, (_number_rule(flag, number) for number in values)), None)
            if broken:
                yield Problem(flag.name, value, *broken)
        elif flag.spec.path == "local" and value is not None:
            words = value if flag.takes_several else (value,)
            yield from (Problem(flag.name, word, *NO_URL) for word in words if "://" in word)
    for pattern in config.optimizer.freeze or ():
        try:
            re.compile(pattern)
        except re.error as error:
            remedy = "use Python's regular expressions"
            yield Problem("--freeze", pattern, f"cannot be read as a regular expression: {error}", remedy)
    for text in config.optimizer.param_group or ():
        try:
            group_rule(text)
        except ValueError as error:
            yield Problem.of_message("--param-group", text, str(error))
    if config.optimizer.lr is None:
        yield Problem("--lr", None, "is required", "add the peak learning rate, for example --lr 3e-4")


def _number_rule(flag: Flag, value: float) -> tuple[str, str] | None:
    """(rule, remedy) of a number that is out of bounds, else None."""
    default = "give another number, or remove it" if flag.default is None else f"the default is {flag.default}"
    if flag.field == "lr":
        default = "for example --lr 3e-4"
    if not math.isfinite(value):
        return "must be finite", default
    if flag.section in EXTENSION_SECTIONS:
        return None
    if flag.field in RANGES:
        low, high, text = RANGES[flag.field]
        return None if low <= value <= high else (f"must be {text}", default)
    if flag.field in MAY_BE_ZERO or flag.default == 0:
        return None if value >= 0 else ("must not be negative", default)
    return None if value > 0 else ("must be above 0", default)
