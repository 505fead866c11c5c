"""Rules of fp8: what is legal, and what is said about what is not."""

from __future__ import annotations

import pytest

from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import notices, resolve, validate
from tests.extensions import needs

BASE = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --mock-data --train-iters 10 --lr 1e-3 "


def problems(flags: str, world_size: int = 1) -> list[str]:
    config = resolve(parse_args([*BASE.split(), *flags.split()]), world_size)
    return [str(problem) for problem in (*validate(config, world_size), *notices(config, world_size))]


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        ("--fp8-format hybrid --bf16", 1),
        ("--fp8-format e4m3 --bf16 --fp8-recipe rowwise --tp 4", 4),
        ("--fp8-format e4m3 --bf16 --fp8-recipe blockwise --tp 4 --hidden-size 512", 4),
        ("--fp8-format e4m3 --bf16 --fp8-recipe blockwise --seq-length 512 --cp 2", 2),
        ("--fp8-format hybrid --bf16 --fp8-amax-history-len 16 --fp8-amax-compute-algo max --fp8-margin 1", 1),
        ("--fp8-format hybrid --bf16 --first-last-layers-bf16 --num-layers-at-end-in-bf16 2", 1),
        ("--fp8-format hybrid --bf16 --seq-length 16 --cp 2 --micro-batch-size 2", 2),
        (
            "--fp8-format hybrid --bf16 --disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 32 --tp 2 "
            "--sequence-parallel",
            2,
        ),
    ],
)
def test_legal(flags: str, world_size: int) -> None:
    assert problems(flags, world_size) == []


NEEDS_BF16 = "--fp8-format hybrid: needs bf16 parameters and activations; "
DELAYED = (
    "has no effect without --fp8-format and --fp8-recipe delayed; add --fp8-format and --fp8-recipe delayed, or remove"
)
OTHER_RECIPE = "has no effect without --fp8-recipe delayed; add --fp8-recipe delayed, or remove"


@pytest.mark.parametrize(
    ("flags", "world_size", "expected"),
    [
        ("--fp8-format hybrid", 1, [NEEDS_BF16 + "add --bf16, or remove --fp8-format"]),
        needs(
            "overlap",
            "--fp8-format hybrid --bf16 --tp 2 --sequence-parallel --tp-comm-overlap",
            2,
            [
                "--fp8-format hybrid: cannot be combined with --tp-comm-overlap: overlapped matrix products are "
                "computed in bf16; keep one of them"
            ],
        ),
        ("--fp8-format hybrid --fp16", 1, [NEEDS_BF16 + "replace --fp16 with --bf16, or remove --fp8-format"]),
        (
            "--fp8-recipe rowwise --bf16",
            1,
            ["--fp8-recipe rowwise: has no effect without --fp8-format; add --fp8-format, or remove --fp8-recipe"],
        ),
        ("--fp8-margin 1 --bf16", 1, [f"--fp8-margin 1: {DELAYED} --fp8-margin"]),
        (
            "--fp8-format hybrid --bf16 --fp8-recipe tensorwise --fp8-margin 1",
            1,
            [f"--fp8-margin 1: {OTHER_RECIPE} --fp8-margin"],
        ),
        (
            "--fp8-format hybrid --bf16 --fp8-margin 17",
            1,
            ["--fp8-margin 17: must be in [0, 16], as e4m3 has 18 powers of two; the default is 0"],
        ),
        (
            "--fp8-format e4m3 --fp8-recipe tensorwise --fp8-amax-history-len 4 --fp8-amax-compute-algo max --bf16",
            1,
            [
                f"--fp8-amax-history-len 4: {OTHER_RECIPE} --fp8-amax-history-len",
                f"--fp8-amax-compute-algo max: {OTHER_RECIPE} --fp8-amax-compute-algo",
            ],
        ),
        (
            "--first-last-layers-bf16 --bf16",
            1,
            [
                "--first-last-layers-bf16: has no effect without --fp8-format; add --fp8-format, or remove "
                "--first-last-layers-bf16"
            ],
        ),
        (
            "--fp8-format hybrid --bf16 --num-layers-at-end-in-bf16 2",
            1,
            [
                "--num-layers-at-end-in-bf16 2: has no effect without --first-last-layers-bf16; add "
                "--first-last-layers-bf16, or remove --num-layers-at-end-in-bf16"
            ],
        ),
        (
            "--fp8-format hybrid --bf16 --first-last-layers-bf16 --num-layers-at-start-in-bf16 3",
            1,
            [
                "--first-last-layers-bf16: 3 first and 1 last of 4 layers leave none in fp8; lower "
                "--num-layers-at-start-in-bf16 or --num-layers-at-end-in-bf16, or remove --fp8-format"
            ],
        ),
        (
            "--fp8-format hybrid --bf16 --hidden-size 72 --kv-channels 16 --ffn-hidden-size 256",
            1,
            ["--hidden-size 72: must be a multiple of 16 under --fp8-format; nearest: 64 or 80"],
        ),
        (
            "--fp8-format hybrid --bf16 --disable-bias-linear --num-experts 4 --moe-latent-size 24 --tp 2 "
            "--seq-length 48 --sequence-parallel --ffn-hidden-size-pattern [64]*3+[48] --moe-layer-freq 2",
            2,
            [
                "--ffn-hidden-size-pattern [64]*3+[48]: has a layer of 48, which must be a multiple of 16 * "
                "--tensor-model-parallel-size 2 under --fp8-format; nearest: 32 or 64",
                "--moe-latent-size 24: must be a multiple of 16 under --fp8-format; nearest: 16 or 32",
                "--seq-length 48: gives a rank 24 tokens of a micro-batch to project to latents, which must be a "
                "multiple of 16 under --fp8-format; nearest: 32 or 64, or another --micro-batch-size",
            ],
        ),
        (
            "--fp8-format hybrid --bf16 --head-wise-attn-gate",
            1,
            [
                "--head-wise-attn-gate: makes 196 rows of queries, gates, keys and values and 64 channels of values of "
                "4 heads in 4 groups; both must be a multiple of 16 * --tensor-model-parallel-size 1 under "
                "--fp8-format; use a number of heads that is a multiple of 16"
            ],
        ),
        (
            "--fp8-format hybrid --bf16 --value-channels 6",
            1,
            [
                "--value-channels 6: makes 152 rows of queries, keys and values and 24 channels of values of 4 heads "
                "in 4 groups; both must be a multiple of 16 * --tensor-model-parallel-size 1 under --fp8-format; use "
                "a multiple of 16"
            ],
        ),
        (
            "--fp8-format hybrid --bf16 --tp 4 --kv-channels 12",
            4,
            [
                "--num-attention-heads 4: queries of 48 channels must be a multiple of 16 * "
                "--tensor-model-parallel-size 4 under --fp8-format; add --kv-channels, nearest: 16"
            ],
        ),
        (
            "--fp8-format hybrid --bf16 --tp 2 --kv-channels 8 --group-query-attention --num-query-groups 2 "
            "--num-attention-heads 4 --tp 4 --ffn-hidden-size 200",
            4,
            [
                "--num-query-groups 2: must be a multiple of --tensor-model-parallel-size 4; nearest: 4, or a TP size "
                "that divides it",
                "--num-attention-heads 4: queries of 32 channels must be a multiple of 16 * "
                "--tensor-model-parallel-size 4 under --fp8-format; add --kv-channels, nearest: 16",
                "--ffn-hidden-size 200: must be a multiple of 16 * --tensor-model-parallel-size 4 under --fp8-format; "
                "nearest: 192 or 256",
            ],
        ),
        (
            "--fp8-format hybrid --bf16 --tp 2 --kv-channels 8 --group-query-attention --num-query-groups 1 --tp 1 "
            "--num-attention-heads 2 --kv-channels 24 --num-attention-heads 4 --kv-channels 4",
            1,
            [
                "--num-query-groups 1: keys and values of 8 channels must be a multiple of 16 * "
                "--tensor-model-parallel-size 1 under --fp8-format; add --kv-channels, nearest: 8"
            ],
        ),
        (
            "--fp8-param-gather --bf16",
            1,
            ["--fp8-param-gather: has no effect without --fp8-format; add --fp8-format, or remove --fp8-param-gather"],
        ),
        (
            "--fp8-param-gather --bf16 --fp8-format e4m3 --data-parallel-sharding-strategy no_shard",
            1,
            [
                "--fp8-param-gather: has no effect beside --data-parallel-sharding-strategy no_shard: no parameters "
                "are gathered; remove --fp8-param-gather, or use --data-parallel-sharding-strategy optim"
            ],
        ),
        (
            "--fp8-param-gather --bf16 --fp8-format e4m3 --fp8-recipe rowwise",
            1,
            [
                "--fp8-param-gather: needs a recipe with one cast of each weight, and --fp8-recipe rowwise makes one "
                "by rows and one by columns; remove --fp8-param-gather, or use --fp8-recipe tensorwise, delayed or "
                "blockwise"
            ],
        ),
        (
            "--fp8-format e4m3 --bf16 --fp8-recipe blockwise --tp 2 --kv-channels 16",
            2,
            [
                "--num-attention-heads 4: queries of 64 channels must be a multiple of 128 * "
                "--tensor-model-parallel-size 2 under --fp8-recipe blockwise; add --kv-channels, nearest: 64"
            ],
        ),
        (
            "--fp8-format e4m3 --bf16 --fp8-recipe blockwise --tp 2 --kv-channels 64 --ffn-hidden-size 320",
            2,
            [
                "--ffn-hidden-size 320: must be a multiple of 128 * --tensor-model-parallel-size 2 under "
                "--fp8-recipe blockwise; nearest: 256 or 512"
            ],
        ),
        (
            "--fp8-format e4m3 --bf16 --fp8-recipe blockwise --seq-length 256 --cp 2",
            2,
            [
                "--seq-length 256: a rank has pieces of 64 tokens; under --fp8-recipe blockwise they must be multiples "
                "of 128; nearest: 512, or another --micro-batch-size"
            ],
        ),
        (
            "--fp8-format hybrid --bf16 --seq-length 24",
            1,
            [
                "--seq-length 24: a rank has 24 tokens of a micro-batch; under --fp8-format this must be a multiple of "
                "16; nearest: 16 or 32, or another --micro-batch-size"
            ],
        ),
        (
            "--fp8-format hybrid --bf16 --disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 32 --tp 4 "
            "--sequence-parallel",
            4,
            [
                "--moe-ffn-hidden-size 32: must be a multiple of 16 * --expert-tensor-parallel-size 4 under "
                "--fp8-format; nearest: 64"
            ],
        ),
        (
            "--fp8-format hybrid --bf16 --disable-bias-linear --num-experts 4 --moe-shared-expert-intermediate-size 40",
            1,
            [
                "--moe-shared-expert-intermediate-size 40: must be a multiple of 16 * --tensor-model-parallel-size 1 "
                "under --fp8-format; nearest: 32 or 48"
            ],
        ),
        (
            "--fp8-format e4m3 --bf16 --mtp-num-layers 1 --hidden-size 48 --kv-channels 16 --ffn-hidden-size 64 --tp 2",
            2,
            [
                "--hidden-size 48: must be a multiple of 16 * --tensor-model-parallel-size 2 under --fp8-format with "
                "--mtp-num-layers; nearest: 32 or 64"
            ],
        ),
    ],
)
def test_illegal(flags: str, world_size: int, expected: list[str]) -> None:
    assert problems(flags, world_size) == expected
