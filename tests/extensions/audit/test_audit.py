"""Test that audits detect a flipped bit and report the rank and the tensor. In a correct run, audits raise no alarm."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.extensions.operate.audit.sketch import distance, sketch_of
from megatron.extensions.operate.audit.verdict import (
    BUCKET,
    OUTPUT,
    RECEIVED,
    REDUCED,
    WEIGHT,
    Difference,
    Report,
    decide,
    shift_of_replicas,
)
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve_legal
from tests.extensions.audit.runs import AUDITED, Flip, audited

TP = "--tensor-model-parallel-size 2"
PP = "--pipeline-model-parallel-size 2"


def test_a_sketch_detects_equal_bits_and_measures_the_distance() -> None:
    torch.manual_seed(1)
    x = torch.randn(1000)
    assert sketch_of(x).equal(sketch_of(x.clone().view(10, 100)))
    for size in (1e-6, 1e-3, 0.5):
        gaps = []
        for _ in range(20):
            y = x + size * torch.randn(1000)
            gaps.append(distance(sketch_of(x).tolist(), sketch_of(y).tolist()))
        assert 0.7 * size < math.sqrt(sum(gap**2 for gap in gaps) / 20) * 1.0 < 1.4 * size
    y = x.clone()
    y[7] = torch.nan
    assert distance(sketch_of(x).tolist(), sketch_of(y).tolist()) == math.inf
    assert distance(sketch_of(y).tolist(), sketch_of(y.clone()).tolist()) == 0


def report(rank: int, kind: str = "", **facts: object) -> Report:
    """Return an audit report for one of four replicas with one rank each. According to the report, the next replica
    recomputes the work of this replica."""
    first = Difference(kind, "tensor", 0.5, **facts) if kind else None  # type: ignore[arg-type]
    return Report(rank, f"host{rank}", (rank + 1) % 4, first)


@pytest.mark.parametrize(
    ("case", "named"),
    {
        "erred once": ([report(0), report(1, OUTPUT, of_own=False), report(2), report(3)], (1,)),
        "its peer erred once": ([report(0), report(1, OUTPUT, of_peer=False), report(2), report(3)], (2,)),
        "errs always": (
            [report(0, OUTPUT, of_peer=False), report(1, OUTPUT, of_peer=False), report(2), report(3)],
            (1,),
        ),
        "never the same": ([report(0), report(1, OUTPUT, of_own=False, of_peer=False), report(2), report(3)], (1,)),
        "nothing": ([report(rank) for rank in range(4)], None),
    }.values(),
)
def test_votes_name_the_rank(case: list[Report], named: tuple[int, ...] | None) -> None:
    found = decide(case)
    assert (found.ranks if found else None) == named


def test_a_rank_with_wrong_inputs_is_not_blamed() -> None:
    """Rank 1 receives a wrong message. Rank 0 then receives the result that rank 1 computed from the wrong message."""
    reports = [
        Report(0, "a", 2, Difference(RECEIVED, "late", 0.1, "sum 2", of_own=False)),
        Report(1, "b", 3, Difference(RECEIVED, "early", 0.1, "sum 1", of_own=False), sent=frozenset({"sum 2"})),
        Report(2, "a", 0),
        Report(3, "b", 1),
    ]
    found = decide(reports)
    assert found is not None and (found.ranks, found.tensor) == ((1,), "early")


def test_parts_are_recomputed_by_ranks_with_the_same_experts() -> None:
    assert shift_of_replicas([(0, 1, 2, 3)], [(0,), (1,), (2,), (3,)]) == 1
    assert shift_of_replicas([(0, 1, 2, 3)], [(0, 1), (2, 3)]) == 2
    assert shift_of_replicas([(0, 1)], [(0, 1)]) is None


def test_a_run_without_another_replica_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"--audit-by peer: needs two data-parallel replicas that each hold all experts"
    ):
        resolve_legal(parse_args(f"{AUDITED} {TP}".split()), 2)


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ("", 3),
        (f"{TP} --sequence-parallel --bf16", 4),
        (f"{PP} --overlap-grad-reduce --overlap-param-gather", 4),
        ("--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2", 4),
        ("--context-parallel-size 2", 4),
        ("--data-parallel-sharding-strategy optim_grads_params", 2),
    ],
)
def test_a_correct_run_raises_no_alarm(flags: str, ranks: int) -> None:
    batch = 3 if ranks == 3 else 4
    exact = "context" not in flags
    found = audited(f"--audit-interval 1 --global-batch-size {batch} {flags}", ranks, exact=exact)
    assert (found.audits, found.findings, found.ended) == (4, [], "")


@pytest.mark.parametrize(
    ("flags", "ranks", "fault", "kind", "tensor"),
    [
        ("", 2, Flip("weight", 1), WEIGHT, "decoder.layers.0.mlp.linear_fc1.weight"),
        ("", 2, Flip("bucket", 1), BUCKET, "decoder.final_layernorm.bias"),
        ("", 2, Flip("reduced", 1), REDUCED, "decoder.layers.1.input_layernorm.weight"),
        (TP, 4, Flip("message", 2), RECEIVED, "all_to_all_single over tp"),
        (PP, 4, Flip("message", 3), RECEIVED, "receive over pp"),
        (f"{TP} --bf16", 4, Flip("product", 3), OUTPUT, "decoder.layers.0.self_attention.linear_qkv"),
    ],
)
def test_a_flipped_bit_is_detected_and_the_rank_named(
    flags: str, ranks: int, fault: Flip, kind: str, tensor: str
) -> None:
    found = audited(f"--train-iters 3 {flags}", ranks, [fault])
    ((iteration, finding),) = found.findings
    assert (iteration, finding.ranks, finding.kind) == (2, (fault.rank,), kind)
    assert finding.tensor.startswith(tensor)
    assert bool(found.ended) == (kind == WEIGHT)


def test_a_corrupted_audit_message_does_not_change_the_step() -> None:
    sound, found = audited(PP, 4), audited(PP, 4, [Flip("message", 3)])
    assert found.findings and not sound.findings
    assert found.losses == sound.losses and len(sound.losses) == 4


def test_a_rank_that_disagrees_twice_ends_the_run() -> None:
    found = audited("", 2, [Flip("product", 1, (2, 4))])
    assert [finding.ranks for _, finding in found.findings] == [(1,), (1,)]
    assert "rank 1" in found.ended and "disagreed 2 times" in found.ended
