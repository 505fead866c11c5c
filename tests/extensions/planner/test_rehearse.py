"""`pretrain_gpt.py --rehearse` reports faults that would occur on a cluster, and the call sites of the faulty
collectives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forked import run_program

FIXTURE = Path(__file__).parents[2] / "fixtures" / "planted_collectives.py"

SMALL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 50 --lr 1e-2 --mock-data "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 1 --tp 2 --pp 2 --bf16 --rehearse --world-size 8"
)


def rehearse(*flags: str) -> tuple[int, str]:
    done = run_program("pretrain_gpt.py", *SMALL.split(), *flags)
    return done.returncode, done.stdout + done.stderr


OF_TP = "rank 4 (pp 1, dp 0, tp 0): all_reduce", "rank 5 (pp 1, dp 0, tp 1): ", "tp group [4,5]", "in forward"
OF_PP = "world group [0,1,2,3,4,5,6,7], call ", "rank 0 (pp 0", "rank 4 (pp 1"
PLANTED = {
    "skipped": ("4,5", *OF_TP, "the calls differ"),
    "group": ("4,5", *OF_TP),
    "shape": ("4,5", *OF_TP),
    "order": ("0,4", *OF_PP, "the sizes, types or roots differ", "all_reduce of 4 bfloat16"),
    "message": ("0,4", *OF_PP, "call 1: ", "a message differs from what the receiver expects", "recv of 3 bfloat16"),
}
"""The ranks to rehearse and parts of the expected message, keyed by planted fault."""


@pytest.mark.grid("fault", ["skipped"], list(PLANTED))
def test_a_planted_fault_is_found_with_both_call_sites(fault: str) -> None:
    ranks, *said = PLANTED[fault]
    flags = f"--extension {FIXTURE} --normalization PlantedNorm --planted-fault {fault} --ranks {ranks}"
    code, text = rehearse(*flags.split())
    report = text.partition("A run would fail:")[2]
    assert code == 1 and all(each in report for each in (*said, f"{FIXTURE}:")), text
    assert ranks == "4,5" or report.count(f" at {FIXTURE}:") == 2, text


def test_an_out_of_memory_rank_is_reported_with_its_call_site() -> None:
    flags = f"--extension {FIXTURE} --normalization PlantedNorm --planted-fault memory --ranks 4,5 --device-memory 0.01"
    code, text = rehearse(*flags.split())
    report = text.partition("A run would fail:")[2]
    assert code == 1 and "rank 5 (pp 1, dp 0, tp 1) failed in F(stage 1, microbatch 0)" in report, text
    assert "OutOfMemoryError" in report and "in 1 tensors made at " + str(FIXTURE) in report, text
    assert "rank 4 (pp 1, dp 0, tp 0) failed" not in report, text


ALONE = [
    ("--ranks 0", "no two of the rehearsed ranks take part in the same collective; use --ranks all-distinct"),
    ("--world-size 1 --tp 1 --pp 1", "the run has one rank"),
]


@pytest.mark.parametrize(("flags", "why"), ALONE)
def test_a_one_rank_rehearsal_does_not_claim_agreement(flags: str, why: str) -> None:
    code, text = rehearse(*flags.split())
    lines = text.splitlines()
    assert code == 0 and f"no collectives could be compared: {why}" in lines, text
    assert "No rank fails; nothing was compared." in lines and "agree" not in text, text


def test_a_run_without_faults_passes(tmp_path: Path) -> None:
    report, missing = tmp_path / "report.json", tmp_path / "no"
    code, text = rehearse(
        "--world-size", "4", "--json", str(report), "--load", str(missing), "--allow-missing-checkpoint"
    )
    assert code == 0 and "Rehearsal of 4 of 4 ranks, 3 of 4 micro-batches" in text, text
    assert "No rank fails, and their collectives agree." in text and "checkpoint of all ranks: " in text
    assert f"a run would start at iteration 0: --load {missing}: there is no such folder on this machine" in text
    found = json.loads(report.read_text())
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2, 3] and found["checkpoint_complete"]
    assert found["microbatches_rehearsed"] == 3 and not found["fails"] and found["config"]["load"] == str(missing)
    first = found["ranks"][0]
    assert 0 < first["built_bytes"] < first["peak_bytes"] and first["sent"]["pp"]["calls"] == 10


def test_messages_of_a_dense_model_are_not_attributed_to_experts() -> None:
    code, text = rehearse(*"--world-size 4 --tp 1 --pp 1 --cp 2 --ranks 0".split())
    assert code == 0 and "\n  dp_cp  " in text and "expt" not in text, text


def test_a_killed_rank_is_reported_with_the_others_in_json() -> None:
    flags = f"{SMALL} --extension {FIXTURE} --normalization PlantedNorm --planted-fault killed --ranks 4,5 --json"
    done = run_program("pretrain_gpt.py", *flags.split(), "--load", "no", "--exit-on-missing-checkpoint")
    found = json.loads(done.stdout)  # standard output contains only the JSON object
    assert done.returncode == 1 and found["not_rehearsed"] == [{"rank": 5, "ended_by": "SIGKILL"}]
    assert [rank["rank"] for rank in found["ranks"]] == [4]
    (problem,) = found["problems"]
    assert problem.startswith("start: --exit-on-missing-checkpoint needs a checkpoint, and --load no holds no ")


def test_flags_of_a_rehearsal_are_checked() -> None:
    code, text = rehearse("--ranks", "0,8")
    assert code == 2 and "--ranks 0,8: 8 must be in 0 to 7; raise --world-size, or remove it" in text
