"""Test that a background process next to the run detects a flipped bit and names the rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.extensions.operate.audit.plan_lines import lines
from megatron.extensions.operate.audit.verdict import GRADIENT
from megatron.extensions.plan.planner.flags import PlannedRun
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve_legal
from tests.extensions.audit.runs import AUDITED, Flip, audited

TP = "--tensor-model-parallel-size 2"


@pytest.mark.parametrize(
    ("flags", "ranks", "fault", "told"),
    [
        ("--audit-by layout", 2, Flip("product", 1, bit=31), "a term of one replica: a single process computes"),
        (f"--audit-by precision --bf16 {TP}", 4, Flip("reduced", 3, bit=31), "the sum over ranks: the gradient in a"),
    ],
)
def test_a_flipped_bit_is_detected_and_the_rank_named(
    flags: str, ranks: int, fault: Flip, told: str, tmp_path: Path
) -> None:
    """The test flips sign bits, because other flips would make the step non-finite."""
    found = audited(f"{flags} --train-iters 2 --save {tmp_path}", ranks, [fault])
    ((iteration, finding),) = found.findings
    assert (iteration, finding.ranks, finding.kind) == (2, (fault.rank,), GRADIENT)
    assert told in finding.cause and (tmp_path / "audit" / "iter_0000002" / "job.json").is_file()


def test_a_correct_run_raises_no_alarm(tmp_path: Path) -> None:
    found = audited(f"--audit-by layout --bf16 --sequence-parallel {TP} --train-iters 2 --save {tmp_path}", 2)
    assert (found.audits, found.findings) == (1, [])
    assert not list((tmp_path / "audit").glob("iter*"))


def test_a_run_without_a_folder_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--audit-by layout: passes steps to a .* process .* give --save FOLDER"):
        resolve_legal(parse_args(f"{AUDITED} --audit-by layout".split()), 1)


def test_the_plan_states_the_cost_of_audits() -> None:
    def said(flags: str) -> str:
        config = resolve_legal(parse_args(f"{AUDITED} --audit-interval 50 {flags}".split()), 2)
        return "\n".join(lines(PlannedRun(config, 2, 2, 0.5, None)))

    assert "a second forward and backward pass every 50 steps, at most 0.5 s each: at most 2.00% of" in said("")
    assert "32.50 KiB of weights are written to --save every 50 steps" in said("--audit-by layout --save runs/a")
