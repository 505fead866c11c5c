"""The short form of `python -m tests.extensions.diagnosis.planted_bugs`: bugs in real training that a rule names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.extensions.diagnosis.planted_bugs import BUGS, alarms, nothing, records, scaled_lookup, shared_seed

MODEL = (
    "--cpu --num-layers 3 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 64 --mock-data "
    "--make-vocab-size-divisible-by 8 --global-batch-size 8 --micro-batch-size 8 --normalization RMSNorm --lr 1e-2 "
    "--lr-warmup-iters 10 --untie-embeddings-and-output-weights --num-workers 0 --log-interval 5 --log-layer-stats 1 "
    "--eval-iters 0 "
)
AT, AFTER_WARM_UP = 32, 62


@pytest.mark.parametrize("name", [name for name in BUGS if name != "output of a layer grows"])
def test_a_bug_is_named_within_ten_steps(tmp_path: Path, name: str) -> None:
    bug = BUGS[name]
    first = 1 if bug.plant is shared_seed else AFTER_WARM_UP if bug.plant is scaled_lookup else AT
    found = records(tmp_path / "metrics.jsonl", bug.ranks, f"{MODEL} --train-iters {first + 10}", bug.plant, first)
    told = alarms(found)
    assert told and all(first <= iteration < first + 10 for iteration, _ in told)
    assert any(bug.names in line for _, line in told)


def test_nothing_is_said_of_a_run_without_a_bug(tmp_path: Path) -> None:
    found = records(tmp_path / "metrics.jsonl", 1, f"{MODEL} --train-iters 75", nothing, 0)
    assert alarms(found) == []
    assert [record["iteration"] for record in found if "layers" in record] == [*range(1, 76)]
    assert {record["schema"] for record in found} == {1}
