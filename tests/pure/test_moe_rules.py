"""Patterns of layers with experts, and what is said of kernels for them. test_rules.py has the rules of their flags."""

from __future__ import annotations

import pytest
import torch

from megatron.core.config.layers import each, layer_pattern
from megatron.core.moe.experts import has_grouped_kernel
from megatron.training.config.arguments import parse_args
from megatron.training.config.flags import config_of_sections
from megatron.training.config.validation import resolve
from tests.rules import problems


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", [1, 1, 1, 1]),
        ("2", [1, 0, 1, 0]),
        ("([0]*1+[1]*3)*1", [0, 1, 1, 1]),
        ("[0, 1] * 2", [0, 1, 0, 1]),
        ("2*[1,0]", [1, 0, 1, 0]),
        ("(0,1,1,0)", [0, 1, 1, 0]),
    ],
)
def test_layer_patterns(text: str, expected: list[int]) -> None:
    assert list(layer_pattern(text, 4, each)) == [bool(item) for item in expected]


BROKEN = ["", "0", "-1", "[1]*3", "[1,2,0,0]", "x", "1.5", "[[1]]*4", "__import__('os')", "[1]**4"]


@pytest.mark.parametrize("text", BROKEN)
def test_broken_layer_patterns(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        layer_pattern(text, 4, each)


EXPERTS = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1 --mock-data --train-iters 1 "
EXPERTS += "--num-experts 8 --disable-bias-linear"
GROUPED = "--moe-grouped-gemm"


@pytest.mark.parametrize("width", [24, 25, 32, 34])
@pytest.mark.parametrize("precision", ["--bf16", "--fp32", "--fp64"])
def test_the_notice_is_what_experts_find_on_cpu(width: int, precision: str) -> None:
    flags = f"--cpu {GROUPED} {precision} --moe-ffn-hidden-size {width}"
    config = resolve(parse_args(f"{EXPERTS} {flags}".split()), 1)
    dtype = getattr(torch, config.parallel.params_dtype)
    said = any(line.startswith(GROUPED) for line in problems(flags, base=EXPERTS))
    assert said != has_grouped_kernel(dtype, torch.device("cpu"), config.model.hidden_size, width)


def test_one_loss_of_an_older_file_is_read() -> None:
    saved = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1}
    model = config_of_sections({"model": saved}).model
    assert model.moe_balancing_coeff("seq_aux_loss") == 0.1 and not model.moe_balancing_coeff(
        "aux_loss", "global_aux_loss"
    )
