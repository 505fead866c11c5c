"""Flags whose value is a pattern of layers: what each layer is."""

from __future__ import annotations

from megatron.core.config.layers import Span
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve

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
