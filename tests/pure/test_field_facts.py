"""Tests of the facts that configuration fields state about other flags (`no_effect_without`, `off_without`, `needs`,
`excludes`), and of the bounds of numbers. The tests first violate and then satisfy each fact."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from megatron.core.config.attention import OF_TABLES
from megatron.core.config.flag_spec import Condition, FlagSpec
from megatron.core.config.model import TransformerConfig
from megatron.training.config.arguments import parse_args
from megatron.training.config.flags import EXTENSION_SECTIONS, Flag, all_flags, spelling_table, value_of
from megatron.training.config.rules.fields import REQUIRED, needs_and_exclusions, single_values
from megatron.training.config.rules.training import skipped_steps
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import notices, resolve

GOOD = "--num-layers 4 --hidden-size 48 --num-attention-heads 12 --seq-length 16 --lr 1e-3 --data-path a"
SAMPLES: dict[type, str] = {int: "7", float: "0.7", str: "2"}
NO_EFFECT = [(f, c) for f in all_flags() for c in f.section_needs or f.spec.no_effect_without]
NESTED = [(f, c) for f in all_flags() if f.section_needs for c in f.spec.no_effect_without]
OFF = [(f, c) for f in all_flags() for c in f.spec.off_without]
NEEDS = [(f, c) for f in all_flags() for c in f.spec.needs if f.field not in ("apply_layernorm_1p", "norm_parameters")]
EXCLUDES = [(f, c) for f in all_flags() for c in f.spec.excludes if c.parts[0].split()[0] in spelling_table()]
FREE_TEXT = ("GPUs", "--profile --use-pytorch-profiler", "--profile on GPUs")
"""Conditions that are declared as free text, because they depend on several flags or on the device."""

BROKEN_BY = {
    "GPUs": "--cpu",
    OF_TABLES: "--position-embedding-type none",
    "--moe-router-score-function softmax": "--moe-router-score-function sigmoid",
    "--moe-router-topk-normalization": "--moe-router-score-function sigmoid --no-moe-router-topk-normalization",
    "--moe-router-topk above 1": "--moe-router-score-function sigmoid --moe-router-topk 1",
    "--eval-iters above 0": "--eval-iters 0",
}
"""Dictionary that maps each condition that is satisfied by default to flags that violate the condition."""


def given(flag: Flag) -> str:
    """Return command-line text that sets the flag to a value that differs from its default."""
    other = [choice for choice in flag.spec.choices or () if flag.default not in (choice, (choice,))]
    return flag.name if flag.kind is bool else f"{flag.name} {other[0] if other else SAMPLES[flag.kind]}"


def asked(condition: Condition) -> str:
    """Return flags that satisfy a condition. If the condition has alternatives, the flags satisfy the first
    alternative."""
    name, *rest = condition.parts[0].split(" or ")[0].split()
    if name == "--rope-type":
        return "--rope-type yarn --position-embedding-type rope"
    if not name.startswith("--"):
        name, rest = condition.parts[2].removeprefix("add "), []
    if rest:
        return f"{name} {float(rest[1]) + 1:g}" if rest[0] == "above" else f"{name} {rest[0]}"
    flag = spelling_table()[name][0]
    return name if flag.name == f"--no-{name[2:]}" else given(flag)


def config_of(*flags: str) -> RunConfig:
    return parse_args(" ".join([GOOD, *flags]).split())


def lines(flag: Flag, *flags: str) -> list[str]:
    return [str(p) for p in needs_and_exclusions(config_of(given(flag), *flags)) if p.flag == flag.name]


def ids(pairs: list[tuple[Flag, Condition]]) -> list[str]:
    return [f"{flag.name} {condition.parts[0]}" for flag, condition in pairs]


@pytest.mark.parametrize(("flag", "condition"), NO_EFFECT, ids=ids(NO_EFFECT))
def test_flags_without_effect_are_reported(flag: Flag, condition: Condition) -> None:
    needed = condition.parts[0]
    broken = BROKEN_BY.get(needed, "")
    # the condition names the flag itself (as for --num-experts), so setting the flag satisfies its own condition
    if flag.name in needed:
        assert not lines(flag)
    else:
        line = f"{given(flag)}: has no effect without {needed}; add {needed}, or remove {flag.name}"
        assert line in lines(flag, broken)
    if needed not in FREE_TEXT:
        assert not any(f"without {needed};" in line for line in lines(flag, asked(condition)))


@pytest.mark.parametrize(("flag", "condition"), NESTED, ids=ids(NESTED))
def test_flags_without_effect_are_reported_within_active_sections(flag: Flag, condition: Condition) -> None:
    section, needed = [asked(each) for each in flag.section_needs], condition.parts[0]
    found = lines(flag, *section, BROKEN_BY.get(needed, ""))
    assert f"has no effect without {needed}; add {needed}" in " ".join(found)
    assert f"without {needed};" not in " ".join(lines(flag, *section, asked(condition)))


@pytest.mark.parametrize(("flag", "condition"), OFF, ids=ids(OFF))
def test_features_turn_off_without_their_condition(flag: Flag, condition: Condition) -> None:
    alone, needed = config_of(given(flag)), condition.parts[0]
    line = f"{given(flag)}: has no effect without {needed}; add {needed}, or remove {flag.name}"
    assert line in [str(problem) for problem in notices(alone, 1)]
    assert value_of(resolve(alone, 1), flag) == flag.default
    assert value_of(resolve(config_of(given(flag), asked(condition)), 2), flag) != flag.default


@pytest.mark.parametrize(("flag", "condition"), NEEDS, ids=ids(NEEDS))
def test_unmet_needs_are_reported(flag: Flag, condition: Condition) -> None:
    section, (needed, why, remedy) = [asked(each) for each in flag.section_needs], condition.parts
    said = f"{given(flag)}: needs {needed}{why}; {remedy or f'add {needed}, or remove {flag.name}'}"
    assert said in lines(flag, *section, BROKEN_BY.get(needed, ""))
    assert not any("needs" in line for line in lines(flag, *section, asked(condition)))


def test_another_normalization_cannot_center_its_weights() -> None:
    config = config_of("--apply-layernorm-1p")
    assert not list(needs_and_exclusions(config))
    (problem,) = needs_and_exclusions(replace(config, model=replace(config.model, normalization="Other")))
    assert str(problem).startswith("--apply-layernorm-1p: needs --normalization LayerNorm or --normalization RMSNorm;")


@pytest.mark.parametrize(("flag", "condition"), EXCLUDES, ids=ids(EXCLUDES))
def test_excluded_combinations_are_reported(flag: Flag, condition: Condition) -> None:
    section = [asked(each) for each in flag.section_needs]
    (line,) = [each for each in lines(flag, *section, asked(condition)) if condition.parts[0].split()[0] in each]
    assert line.startswith(f"{given(flag)}: cannot be combined with {asked(condition)}"), line
    assert line.endswith(f"{condition.parts[1]}; keep one of them")
    assert not any("cannot be combined" in each for each in lines(flag, *section))


def edges(flag: Flag) -> Iterator[tuple[float, bool]]:
    """Yield numbers on both sides of the bounds of a flag. Each number is yielded with a boolean that is True if the
    number is valid."""
    spec, step = flag.spec, 1 if flag.kind is int else 1e-6
    if not spec.bounded and flag.section not in EXTENSION_SECTIONS:
        spec = FlagSpec(at_least=0) if flag.default == 0 else FlagSpec(above=0)
    if spec.at_least is not None:
        yield from ((spec.at_least, True), (spec.at_least - step, False))
    if spec.above is not None:
        yield from ((spec.above + step, True), (spec.above, False))
    if spec.at_most is not None:
        yield from ((spec.at_most, True), (spec.at_most + step, False))
    if spec.below is not None:
        yield from ((spec.below - step, True), (spec.below, False))
    if flag.kind is float:
        yield math.inf, False


EDGES = [(f, *edge) for f in all_flags() if f.kind in (int, float) and f.field not in REQUIRED for edge in edges(f)]


@pytest.mark.parametrize(("flag", "value", "is_legal"), EDGES, ids=[f"{f.name} {value}" for f, value, _ in EDGES])
def test_bounds_are_enforced(flag: Flag, value: float, is_legal: bool) -> None:
    text = f"{value:.10g}" if flag.kind is float else str(int(value))
    try:
        found = [str(p) for p in single_values(config_of(f"{flag.name} {text}")) if p.flag == flag.name]
    except ValueError as error:  # the parser already checks flags that accept either a number or a word
        found = str(error).splitlines()
    assert bool(found) != is_legal, found
    assert is_legal or (found[0].startswith(f"{flag.name} ") and ": must " in found[0] and "; " in found[0])


def test_skipped_steps_need_a_check() -> None:
    def found(flags: str) -> list[str]:
        return [str(problem) for problem in skipped_steps(parse_args(f"{GOOD} {flags}".split()), 1)]

    checks = [flag.name for flag in all_flags() if flag.spec.skips_steps]
    assert found("--max-skipped-iterations 2") == found("--no-check-for-nan-in-loss-and-grad") == []
    for check in checks[1:]:
        assert found(f"--max-skipped-iterations 2 --no-check-for-nan-in-loss-and-grad {check}") == []
    remedy = "".join(f", or add {check}" for check in checks[1:2])
    assert found("--max-skipped-iterations 2 --no-check-for-nan-in-loss-and-grad") == [
        f"--max-skipped-iterations 2: needs {' or '.join(checks)}: without such a check, no step is skipped; "
        f"remove --no-check-for-nan-in-loss-and-grad{remedy}"
    ]


def test_effective_values_exist() -> None:
    named = {flag.spec.effective for flag in all_flags() if flag.spec.effective}
    assert len(named) > 10
    assert [name for name in sorted(named) if not hasattr(TransformerConfig, name)] == []
