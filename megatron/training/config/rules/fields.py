"""Rules that are declared in the configuration fields: required values, number ranges, and flags that a flag requires
or excludes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from megatron.core.config.flag_spec import Condition, FlagSpec
from megatron.core.dist_checkpointing.path_kind import RUN_CONFIG
from megatron.training.config.flags import (
    EXTENSION_SECTIONS,
    Flag,
    all_flags,
    holds,
    shown_value,
    spelling_table,
    value_of,
)
from megatron.training.config.problem import Problem, path_rule
from megatron.training.config.run_config import RunConfig

REQUIRED = {
    "num_layers": "give --num-layers N, the number of transformer layers",
    "hidden_size": "give --hidden-size N, the width of the model",
    "num_attention_heads": "give --num-attention-heads N, the number of attention heads",
    "seq_length": "give --seq-length N, the number of tokens in a sample",
}
"""Remedies for the required fields, whose values must be above 0. A value of 0 means that the user has not set the
field."""


def _saved_values(config: RunConfig) -> str:
    load = config.checkpoint.load_root
    saved = load / RUN_CONFIG if isinstance(load, Path) else None
    return f", or --config {saved} to reuse that run's flags" if saved is not None and saved.is_file() else ""


def single_values(config: RunConfig) -> Iterator[Problem]:
    """Check each value independently of the others."""
    for flag in all_flags():
        value = value_of(config, flag)
        if flag.field == "num_layers" and config.model.pattern is not None:
            continue  # the layer pattern determines the number of layers, so the flag is not required
        if flag.field in REQUIRED:
            if value < 1:
                given = value != 0 or flag.field in dict(config.given)
                rule = "must be at least 1" if given else "is required, and must be at least 1"
                yield Problem(flag.name, value if given else None, rule, REQUIRED[flag.field] + _saved_values(config))
        elif flag.kind in (int, float) and value is not None:
            values = value if flag.takes_several else (value,)
            broken = next(filter(None, (number_rule(flag, number) for number in values)), None)
            if broken:
                yield Problem(flag.name, value, *broken)
        elif flag.spec.path in ("local", "stored") and value is not None:
            words, kind = value if flag.takes_several else (value,), flag.spec.path
            yield from (Problem(flag.name, word, *broken) for word in words if (broken := path_rule(kind, word)))
    if config.optimizer.lr is None and not config.training.skip_train:
        yield Problem("--lr", None, "is required", "add the peak learning rate, for example --lr 3e-4")


def needs_and_exclusions(c: RunConfig) -> Iterator[Problem]:
    """Check that the flags which each given flag requires are set, and that the flags which it excludes are not set."""
    for flag in all_flags():
        value = value_of(c, flag)
        if value == flag.default:
            continue
        name = flag.name
        shown = shown_value(value)
        spec = flag.spec
        idle = [each for each in flag.section_needs if not holds(c, each)]
        missing = [each for each in spec.no_effect_without if not holds(c, each)]
        # If all flags of a section have no effect, one notice is enough. Conditions that name a flag of that section
        # are skipped.
        for condition in idle + [each for each in missing if not (idle and _section(each) == flag.section)]:
            yield Problem.no_effect(name, shown, condition.parts[0])
        for needed, why, remedy in () if idle else (each.parts for each in spec.needs if not holds(c, each)):
            yield Problem(name, shown, f"needs {needed}{why}", remedy or f"add {needed}, or remove {name}")
        for condition in () if idle else (each for each in spec.excludes if holds(c, each)):
            yield Problem.exclusive(name, shown, _as_given(c, condition), condition.parts[1].removeprefix(": "))


def _section(condition: Condition) -> str:
    """Return the section of the first flag in a condition. Return "" if the condition, such as "GPUs", names no
    flag."""
    named = spelling_table().get(condition.parts[0].split()[0])
    return named[0].section if named else ""


def _as_given(c: RunConfig, condition: Condition) -> str:
    """Return the name of the flag that a condition tests, followed by the flag's current value."""
    name, *rest = condition.parts[0].split()
    value = shown_value(value_of(c, spelling_table()[name][0]))
    return " ".join([name, *rest]) if value is None else f"{name} {value}"


SMALLEST, LARGEST = 2.0**-126, 2.0**127
"""Smallest and largest absolute values that fp32 represents with full precision."""

LIMITS: dict[str, tuple[float, str]] = {
    **dict.fromkeys(("minutes", "mins"), (100_000_000, ", about 190 years")),
    "seconds": (1_000_000_000, ", about 32 years"),
    **dict.fromkeys(("eps", "epsilon"), (1, "")),
    **dict.fromkeys(("lr", "std", "coeff", "decay", "multiplier", "multipliers", "factor"), (1_000_000, "")),
}
"""Upper limits for the numeric values of this program's flags. Each key is a word in the names of configuration fields.
Each value is a pair of the limit and a comment on the limit."""


def _limit(flag: Flag) -> tuple[float, str] | None:
    """Return the upper limit from LIMITS for a field, or None if the field declares a bound or its name contains no
    word in LIMITS."""
    own = flag.spec.at_most is not None or flag.spec.below is not None
    words = flag.field.split("_") if flag.kind is float and not own and _is_ours(flag) else []
    return next((LIMITS[word] for word in words if word in LIMITS), None)


def _is_ours(flag: Flag) -> bool:
    """Return True if this program defines the flag, and False if a user's extension defines it."""
    extension = EXTENSION_SECTIONS.get(flag.section)
    return extension is None or extension.cls.__module__.startswith("megatron.")


def number_rule(flag: Flag, value: float) -> tuple[str, str] | None:
    """Return (rule, remedy) if `value` is outside the flag's bounds, or None otherwise."""
    default = "give another number, or remove it" if flag.default is None else f"the default is {flag.default}"
    if flag.field == "lr":
        default = "for example --lr 3e-4"
    if not math.isfinite(value):
        return "must be finite", default
    if flag.kind is float and _is_ours(flag) and value and not SMALLEST <= abs(value) <= LARGEST:
        return f"must be 0 or between {SMALLEST:g} and {LARGEST:g}, the range of normal fp32 numbers", default
    if (limit := _limit(flag)) is not None and value > limit[0]:
        return f"must be at most {limit[0]:,}{limit[1]}", default
    spec = flag.spec
    if not spec.bounded and flag.section in EXTENSION_SECTIONS:
        return None
    if not spec.bounded:
        spec = FlagSpec(at_least=0) if flag.default == 0 else FlagSpec(above=0)
    rule = spec.broken_bound(value)
    return None if rule is None else (rule, default)
