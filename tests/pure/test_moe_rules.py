"""Patterns of layers with experts, and the rules of the flags of experts."""

from __future__ import annotations

import pytest
import torch

from megatron.core.config.layers import each, layer_pattern
from megatron.core.moe.experts import has_grouped_kernel
from megatron.training.config.arguments import parse_args
from megatron.training.config.flags import config_of_sections
from megatron.training.config.validation import notices, resolve, validate
from tests.extensions import needs


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


BASE = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1 --mock-data --train-iters 1 "
EXPERTS = BASE + "--num-experts 8 --disable-bias-linear "
GROUPS = "--moe-router-num-groups"
GROUPED = "--moe-grouped-gemm"
SINKHORN = "--moe-router-load-balancing-type sinkhorn"


def problems(argv: str, world_size: int) -> list[str]:
    config = resolve(parse_args(argv.split()), world_size)
    return [str(problem) for problem in (*validate(config, world_size), *notices(config, world_size))]


@pytest.mark.parametrize(
    ("flags", "world_size", "expected"),
    [
        ("--moe-router-topk 9", 1, "--moe-router-topk 9: must be at most --num-experts 8; nearest: 8"),
        ("--moe-router-topk 1", 1, "--moe-router-topk 1: the softmax over one expert is always 1"),
        ("--ep 3", 3, "--num-experts 8: must be a multiple of --expert-model-parallel-size 3; nearest: 6 or 9"),
        ("--ep 4", 2, "--expert-model-parallel-size 4: times --expert-tensor-parallel-size 1 must divide the 2 ranks"),
        ("--etp 3", 3, "--moe-ffn-hidden-size 128: must be a multiple of --expert-tensor-parallel-size 3"),
        ("--tp 2", 2, "--num-experts 8: needs --sequence-parallel with TP"),
        ("--moe-layer-freq [1]*3", 1, "--moe-layer-freq [1]*3: the list must have a 0 or 1 for each of 4 layers"),
        ("--moe-layer-freq [0]*4", 1, "--moe-layer-freq [0]*4: selects no layer for experts; use another pattern, or"),
        ("--moe-router-enable-expert-bias", 1, "--moe-router-enable-expert-bias: needs scores of sigmoid"),
        (
            "--moe-router-score-function sigmoid --moe-router-pre-softmax",
            1,
            "--moe-router-pre-softmax: has no effect without",
        ),
        (
            "--moe-aux-loss-coeff 1 --moe-router-load-balancing-type none",
            1,
            "--moe-aux-loss-coeff 1.0: cannot be combined",
        ),
        (f"{SINKHORN} aux_loss --moe-aux-loss-coeff 1 1", 1, "sinkhorn aux_loss: sinkhorn is no loss to add"),
        (
            "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1",
            1,
            "--moe-aux-loss-coeff 1.0: must be as many as the 2 of --moe-router-load-balancing-type",
        ),
        (f"{SINKHORN} --moe-aux-loss-coeff 1", 1, f"--moe-aux-loss-coeff 1.0: cannot be combined with {SINKHORN}"),
        (f"{SINKHORN} --moe-router-enable-expert-bias", 1, f"expert-bias: cannot be combined with {SINKHORN}"),
        (f"{SINKHORN} --moe-router-score-function sigmoid", 1, f"sigmoid: has no effect with {SINKHORN}"),
        (f"{SINKHORN} --moe-router-topk 1 --moe-router-pre-softmax", 1, f"softmax: has no effect with {SINKHORN}"),
        ("--moe-router-bias-update-rate 1", 1, "--moe-router-bias-update-rate 1.0: has no effect without"),
        ("--moe-token-drop-policy position", 1, "--moe-token-drop-policy position: has no effect without"),
        ("--moe-expert-capacity-factor -1", 1, "--moe-expert-capacity-factor -1.0: must be above 0"),
        ("--moe-router-num-groups 4", 1, "--moe-router-num-groups 4: has no effect without --moe-router-group-topk"),
        ("--moe-router-group-topk 2", 1, "--moe-router-group-topk 2: needs --moe-router-num-groups; add"),
        (f"{GROUPS} 3 --moe-router-group-topk 1", 1, f"{GROUPS} 3: must divide --num-experts 8; nearest: 2"),
        (f"{GROUPS} 2 --moe-router-group-topk 4", 1, f"--moe-router-group-topk 4: must be at most {GROUPS} 2"),
        (f"{GROUPS} 4 --moe-router-group-topk 3", 1, "--moe-router-topk 2: must be a multiple of --moe-router-group"),
        (f"{GROUPS} 8 --moe-router-group-topk 1", 1, "--moe-router-topk 2: must be at most the 1 experts of --moe-"),
        (f"{GROUPS} 4 --moe-router-group-topk 2 {SINKHORN}", 1, f"topk 2: cannot be combined with {SINKHORN}"),
        (
            f"{GROUPED} --bf16 --moe-ffn-hidden-size 25",
            1,
            "--moe-grouped-gemm: has no effect with --moe-ffn-hidden-size 25: grouped kernels need "
            "--moe-ffn-hidden-size to be a multiple of 8; nearest: 24 or 32, or remove --moe-grouped-gemm",
        ),
        (
            f"{GROUPED} --bf16 --moe-ffn-hidden-size 24 --etp 2 --tp 2 --sequence-parallel",
            2,
            "need --moe-ffn-hidden-size / --expert-tensor-parallel-size 2 to be a multiple of 8; nearest: 16 or 32",
        ),
        (f"{GROUPED} --bf16 --hidden-size 36", 1, "with --hidden-size 36: grouped kernels need --hidden-size to be a"),
        (f"{GROUPED} --bf16 --moe-latent-size 12", 1, "--moe-grouped-gemm: has no effect with --moe-latent-size 12"),
        (f"{GROUPED} --fp64 --cpu", 1, "--moe-grouped-gemm: has no effect in float64, in which no grouped kernel comp"),
        (
            f"{GROUPED} --fp16",
            1,
            "has no effect in float16, in which no grouped kernel of GPUs computes; use --bf16, or",
        ),
        needs(
            "fp8",
            f"{GROUPED} --bf16 --fp8-format e4m3 --fp8-recipe blockwise",
            1,
            "--moe-grouped-gemm: has no effect in fp8 with --fp8-recipe blockwise, for which there is no grouped ker",
        ),
        ("--moe-shared-expert-gate", 1, "gate: has no effect without --moe-shared-expert-intermediate-size"),
        ("--moe-shared-expert-intermediate-size 5 --tp 2 --sequence-parallel", 2, "must be a multiple of"),
    ],
)
def test_rules(flags: str, world_size: int, expected: str) -> None:
    found = problems(EXPERTS + flags, world_size)
    assert any(expected in problem for problem in found), found


@pytest.mark.parametrize(
    "flags",
    [
        "--ep 2 --etp 2 --moe-layer-freq 2",
        "--ep 4 --moe-router-topk 1 --moe-router-pre-softmax --moe-aux-loss-coeff 1e-2",
        "--tp 2 --sequence-parallel --etp 1 --ep 4 --moe-token-dispatcher-type alltoall",
        "--pp 2 --ep 2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        f"{GROUPED} --bf16",
        f"{GROUPED} --cpu",
        needs("fp8", f"{GROUPED} --bf16 --fp8-format e4m3 --micro-batch-size 2"),
        f"--ep 2 {GROUPS} 4 --moe-router-group-topk 2",
        f"--ep 2 {SINKHORN} --moe-router-topk 1 --moe-z-loss-coeff 1e-3 --moe-router-force-load-balancing",
    ],
)
def test_legal(flags: str) -> None:
    assert problems(EXPERTS + flags, 4) == []


def test_a_number_of_experts_that_is_not_legal_is_one_problem() -> None:
    assert problems(f"{BASE} --num-experts 0 --disable-bias-linear", 1) == [
        "--num-experts 0: must be above 0; give another number, or remove it"
    ]


@pytest.mark.parametrize("width", [24, 25, 32, 34])
@pytest.mark.parametrize("precision", ["--bf16", "--fp32", "--fp64"])
def test_the_notice_is_what_experts_find_on_cpu(width: int, precision: str) -> None:
    argv = f"{EXPERTS} --cpu {GROUPED} {precision} --moe-ffn-hidden-size {width}"
    config = resolve(parse_args(argv.split()), 1)
    dtype = getattr(torch, config.parallel.params_dtype)
    said = any(line.startswith(GROUPED) for line in problems(argv, 1))
    assert said != has_grouped_kernel(dtype, torch.device("cpu"), config.model.hidden_size, width)


def test_one_loss_of_an_older_file_is_read() -> None:
    saved = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1}
    model = config_of_sections({"model": saved}).model
    assert model.moe_balancing_coeff("seq_aux_loss") == 0.1 and not model.moe_running_loss_coeff
