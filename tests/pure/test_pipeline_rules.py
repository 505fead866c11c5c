"""Rules of pipeline stages, recomputation and overlap: what is legal, and what is said about what is not."""

from __future__ import annotations

import pytest

from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import notices, resolve, validate

BASE = (
    "--num-layers 14 --hidden-size 48 --num-attention-heads 12 --seq-length 16 --mock-data --train-iters 10 --lr 1e-3"
)
EXPERTS = "--num-experts 4 --disable-bias-linear"


def problems(flags: str, world_size: int) -> list[str]:
    config = resolve(parse_args([*BASE.split(), *flags.split()]), world_size)
    return [str(problem) for problem in (*validate(config, world_size), *notices(config, world_size))]


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        ("--pp 4 --pipeline-schedule interleaved", 4),
        ("--pp 4 --num-virtual-stages-per-pipeline-rank 4", 4),
        ("--pp 4 --num-layers-per-virtual-pipeline-stage 3", 4),
        ("--pp 3 --num-layers-per-virtual-pipeline-stage 1", 3),
        ("--pp 8 --pipeline-schedule zb-v", 8),
        ("--pp 1 --pipeline-schedule zb-v", 1),
        ("--pp 2 --pipeline-schedule zb-h2 --num-virtual-stages-per-pipeline-rank 1", 2),
        ("--pp 4 --decoder-first-pipeline-num-layers 0 --decoder-last-pipeline-num-layers 2", 4),
        ("--pp 2 --decoder-first-pipeline-num-layers 5 --account-for-loss-in-pipeline-split", 2),
        ("--pp 2 --pipeline-model-parallel-layout Et*3|(t*4|)*2,t*3L", 2),
        ("--pp 4 --pipeline-model-parallel-layout E||t*14|L", 4),
        ("--pp 2 --pipeline-schedule zb-v --pipeline-model-parallel-layout Et*4|t*4|t*3|t*3L", 2),
        ("--pp 4 --pipeline-schedule interleaved --microbatch-group-size-per-virtual-pipeline-stage 6", 4),
        ("--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 100 --grad-reduce-in-bf16 --bf16", 2),
        ("--overlap-grad-reduce --no-use-distributed-optimizer", 2),
        ("--recompute-granularity selective --recompute-modules core_attn layernorm mlp_act", 1),
        (f"{EXPERTS} --moe-layer-freq 2 --recompute-granularity selective --recompute-modules moe_act mlp", 1),
    ],
)
def test_legal(flags: str, world_size: int) -> None:
    assert problems(flags, world_size) == []


@pytest.mark.parametrize(
    ("flags", "world_size", "expected"),
    [
        (
            "--pp 2 --pipeline-schedule 1f1b --num-virtual-stages-per-pipeline-rank 2",
            2,
            "--num-virtual-stages-per-pipeline-rank 2: must be 1 with --pipeline-schedule 1f1b; nearest: 1, or use "
            "--pipeline-schedule interleaved",
        ),
        (
            "--pp 2 --pipeline-schedule zb-v --num-layers-per-virtual-pipeline-stage 2",
            2,
            "--num-layers-per-virtual-pipeline-stage 2: makes 4 stages per rank, which must be 2 with "
            "--pipeline-schedule zb-v; remove it, or use --pipeline-schedule interleaved",
        ),
        (
            "--pp 2 --num-layers-per-virtual-pipeline-stage 2 --num-virtual-stages-per-pipeline-rank 2",
            2,
            "--num-layers-per-virtual-pipeline-stage 2: cannot be combined with --num-virtual-stages-per-pipeline-rank",
        ),
        (
            "--pp 4 --num-layers-per-virtual-pipeline-stage 4",
            4,
            "--num-layers-per-virtual-pipeline-stage 4: must be at most --num-layers 14 / "
            "--pipeline-model-parallel-size 4; nearest: 3",
        ),
        (
            "--pp 4 --num-virtual-stages-per-pipeline-rank 5",
            4,
            "--num-virtual-stages-per-pipeline-rank 5: 14 layers, the embedding and the head fill at most 16 stages, "
            "on 4 ranks; nearest: 4",
        ),
        (
            "--pp 9 --pipeline-schedule zb-v",
            9,
            "--pipeline-model-parallel-size 9: 14 layers, the embedding and the head fill at most 16 stages, 2 per "
            "rank; nearest: 3",
        ),
        (
            "--pp 2 --num-virtual-stages-per-pipeline-rank 0",
            2,
            "--num-virtual-stages-per-pipeline-rank 0: must be above",
        ),
        (
            "--pp 2 --decoder-first-pipeline-num-layers 15",
            2,
            "--decoder-first-pipeline-num-layers 15: must be between 0 and --num-layers 14; nearest: 14",
        ),
        (
            "--pp 2 --decoder-last-pipeline-num-layers -1",
            2,
            "--decoder-last-pipeline-num-layers -1: must not be negative",
        ),
        (
            "--pp 2 --decoder-first-pipeline-num-layers 5 --decoder-last-pipeline-num-layers 8",
            2,
            "--decoder-first-pipeline-num-layers 5: and --decoder-last-pipeline-num-layers 8 must add up to "
            "--num-layers 14; nearest: 5 and 9",
        ),
        (
            "--decoder-last-pipeline-num-layers 4",
            1,
            "--decoder-last-pipeline-num-layers 4: needs more than one pipeline rank; leave it out",
        ),
        (
            "--pp 2 --decoder-last-pipeline-num-layers 4 --account-for-loss-in-pipeline-split",
            2,
            "--account-for-loss-in-pipeline-split: cannot be combined with --decoder-last-pipeline-num-layers 4: it "
            "fixes the layers of that end; keep one of them",
        ),
        (
            "--pp 2 --pipeline-model-parallel-layout Et*7|t*6L",
            2,
            "--pipeline-model-parallel-layout Et*7|t*6L: has 13 layers, which must be --num-layers 14; add or "
            "remove t, or use --num-layers 13",
        ),
        (
            "--pp 2 --pipeline-model-parallel-layout Et*7|t*7|L",
            2,
            "--pipeline-model-parallel-layout Et*7|t*7|L: has 3 stages, which must be a multiple of "
            "--pipeline-model-parallel-size 2; nearest: 2 stages",
        ),
        (
            "--pp 2 --pipeline-model-parallel-layout Et*7|t*7,m|L",
            2,
            "--pipeline-model-parallel-layout Et*7|t*7,m|L: must have m, multi-token prediction, in the last stage "
            "only, right before L, whose head it shares; use for example Et*3|t*3|mL",
        ),
        (
            "--pp 2 --pipeline-model-parallel-layout Et*7|t*7,mmL --mtp-num-layers 1",
            2,
            "--pipeline-model-parallel-layout Et*7|t*7,mmL: has m 2 times, which must be --mtp-num-layers 1; write mL "
            "for L, or use --mtp-num-layers 2",
        ),
        (
            "--pp 2 --pipeline-model-parallel-layout Et*7|t*7L --mtp-num-layers 2",
            2,
            "--pipeline-model-parallel-layout Et*7|t*7L: has m 0 times, which must be --mtp-num-layers 2; write mmL "
            "for L, or use --mtp-num-layers 0",
        ),
        (
            "--pp 2 --pipeline-schedule 1f1b --pipeline-model-parallel-layout E|t*7|t*7|L",
            2,
            "--pipeline-model-parallel-layout E|t*7|t*7|L: makes 2 stages per rank, which must be 1 with "
            "--pipeline-schedule 1f1b; use that number, or --pipeline-schedule interleaved",
        ),
        (
            "--pp 2 --pipeline-model-parallel-layout Et*7|t*7L --decoder-first-pipeline-num-layers 7",
            2,
            "--pipeline-model-parallel-layout Et*7|t*7L: cannot be combined with --decoder-first-pipeline-num-layers",
        ),
        (
            "--pp 2 --pipeline-model-parallel-layout Et*7|t*7L --num-layers-per-virtual-pipeline-stage 7",
            2,
            "--pipeline-model-parallel-layout Et*7|t*7L: cannot be combined with --num-layers-per-virtual-pipeline",
        ),
        (
            "--pp 4 --pipeline-schedule interleaved --microbatch-group-size-per-virtual-pipeline-stage 3",
            4,
            "--microbatch-group-size-per-virtual-pipeline-stage 3: must be at least --pipeline-model-parallel-size 4: "
            "smaller groups would wait for each other; nearest: 4",
        ),
        (
            "--pp 2 --microbatch-group-size-per-virtual-pipeline-stage 4",
            2,
            "--microbatch-group-size-per-virtual-pipeline-stage 4: has no effect without several stages per rank",
        ),
        (
            "--recompute-modules mlp",
            1,
            "--recompute-modules mlp: has no effect without --recompute-granularity selective",
        ),
        (
            "--recompute-granularity selective --recompute-num-layers 2",
            1,
            "--recompute-num-layers 2: has no effect without --recompute-granularity full",
        ),
        (
            "--recompute-granularity selective --recompute-modules mlp mlp_act",
            1,
            "--recompute-modules mlp_act: has no effect beside mlp, which includes it; keep one",
        ),
        (
            "--recompute-granularity selective --recompute-modules core_attn moe",
            1,
            "--recompute-modules moe: has no effect without --num-experts; add --num-experts, or remove",
        ),
        (
            "--recompute-granularity selective --recompute-modules shared_experts",
            1,
            "--recompute-modules shared_experts: has no effect without --moe-shared-expert-intermediate-size",
        ),
        (
            f"{EXPERTS} --recompute-granularity selective --recompute-modules moe_act mlp_act",
            1,
            "--recompute-modules mlp_act: has no effect where every layer has experts; use moe_act, or remove mlp_act",
        ),
        (
            f"{EXPERTS} --recompute-granularity selective --recompute-modules moe moe_act",
            1,
            "--recompute-modules moe_act: has no effect beside moe, which includes it; keep one",
        ),
        (
            "--overlap-param-gather --no-use-distributed-optimizer",
            1,
            "--overlap-param-gather: cannot be combined with --no-use-distributed-optimizer",
        ),
        (
            "--overlap-param-gather --data-parallel-sharding-strategy no_shard",
            2,
            "--overlap-param-gather: cannot be combined with --data-parallel-sharding-strategy no_shard: every rank "
            "updates whole parameters, so that there is nothing to gather; add --no-overlap-param-gather, or use "
            "--data-parallel-sharding-strategy optim",
        ),
        (
            "--num-distributed-optimizer-instances 2 --data-parallel-sharding-strategy no_shard",
            4,
            "--num-distributed-optimizer-instances 2: cannot be combined with --data-parallel-sharding-strategy no_sha",
        ),
        ("--grad-reduce-in-bf16 --fp64", 1, "--grad-reduce-in-bf16: cannot be combined with --fp64; keep one of them"),
    ],
)
def test_problems(flags: str, world_size: int, expected: str) -> None:
    (found,) = problems(flags, world_size)
    assert found.startswith(expected)


def test_too_many_stages_both_ways() -> None:
    """Neither fewer ranks nor fewer stages per rank are enough: both are named, with values that fit together."""
    ranks, stages = problems("--pp 18 --num-virtual-stages-per-pipeline-rank 20", 18)
    assert ranks.startswith("--pipeline-model-parallel-size 18: 14 layers, the embedding and the head fill at most 16")
    assert ranks.endswith("20 per rank; nearest: 9")
    assert stages.startswith("--num-virtual-stages-per-pipeline-rank 20: 14 layers, the embedding and the head fill")
    assert stages.endswith("nearest: 1")
    assert not problems("--pp 9 --num-virtual-stages-per-pipeline-rank 1", 9)
