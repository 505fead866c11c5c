"""Flags whose value is a pattern of layers: what each layer is, and what is said of patterns that cannot be meant."""

from __future__ import annotations

import pytest

from megatron.core.config.layers import Span
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import notices, resolve, validate

BASE = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1 --mock-data --train-iters 1 "
ROPE = "--position-embedding-type rope "


def config_of(flags: str) -> RunConfig:
    return resolve(parse_args((BASE + flags).split()), 1)


def test_periods_are_those_of_megatron() -> None:
    """Of N layers the last one has full attention, or no rotary embedding."""
    model = config_of(f"{ROPE} --window-size 5 --window-attn-skip-freq 4 --no-rope-freq 2").model
    assert [kind.span for kind in model.layers] == [Span(5)] * 3 + [Span()]
    assert [kind.rotation is not None for kind in model.layers] == [True, False, True, False]


def test_layers_with_a_window_may_have_another_base_without_scaling() -> None:
    flags = "--window-size 5 --window-attn-skip-freq [0,1,1,0] --window-rotary-base 500"
    rotations = [kind.rotation for kind in config_of(ROPE + flags).model.layers]
    assert [(rotation.base, rotation.scaled) for rotation in rotations if rotation] == [
        (10000.0, True),
        (500.0, False),
        (500.0, False),
        (10000.0, True),
    ]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (f"{ROPE} --no-rope-freq 1", "--no-rope-freq 1: leaves no layer with a rotary embedding; use another pattern"),
        (
            "--window-size 5 --window-attn-skip-freq 1",
            "--window-attn-skip-freq 1: leaves no layer with a window or chunk",
        ),
        (
            "--window-attn-skip-freq 2",
            "--window-attn-skip-freq 2: has no effect without --window-size or --attention-ch",
        ),
        ("--no-rope-freq 2", "--no-rope-freq 2: has no effect without --position-embedding-type rope"),
        (
            "--window-rotary-base 9",
            "--window-rotary-base 9.0: has no effect without --window-size or --attention-chunk",
        ),
    ],
)
def test_patterns_without_effect_are_said(flags: str, expected: str) -> None:
    config = config_of(flags)
    assert validate(config, 1) == []
    assert any(str(notice).startswith(expected) for notice in notices(config, 1))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            "--window-size 5 --window-attn-skip-freq -1",
            "--window-attn-skip-freq -1: -1 must be above 0; use for example",
        ),
        (
            "--window-size 5 --window-attn-skip-freq [1,0]",
            "the list must have a 0 or 1 for each of 4 layers, and has 2",
        ),
        (
            f"{ROPE} --no-rope-freq [0,2,0,0]",
            "the list must have a 0 or 1 for each layer, and has 2 for layer 1; use for",
        ),
        ("--window-size 5 --attention-chunk-size 8", "--attention-chunk-size 8: cannot be combined with --window-size"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(flags: str, expected: str) -> None:
    assert [expected in str(problem) for problem in validate(config_of(flags), 1)] == [True]
