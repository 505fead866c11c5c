"""Test that a rank exits with a failure if its results disagree with its audit twice. All ranks are then restarted
within the job."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pretrain_gpt
from megatron.training import training
from megatron.training.reliability.launch import START
from megatron.training.reliability.run_status import ExitCode
from megatron.training.run import TrainingRun
from tests.extensions.audit.runs import AUDITED, Flip, plant
from tests.forked import run_forked


def faulty(argv: list[str]) -> int:
    """Run `pretrain_gpt.main` with a fault: rank 1 computes two GEMMs incorrectly, but only in the first start of the
    run."""
    whole = training.train

    def train(run: TrainingRun) -> ExitCode:
        if os.environ["RANK"] == "1" and int(os.environ.get(START, "0")) == 0:
            (callback,) = [each for each in run.callbacks if each.name.startswith("audit")]
            plant(Flip("product", 1, (2, 4)), run, callback)
        return whole(run)

    training.train = train
    return pretrain_gpt.main(argv)


def test_the_named_rank_is_restarted(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folders = f"--save {folder} --load {folder} --save-interval 1"
    flags = f"{AUDITED} --deterministic-mode --train-iters 6 {folders} --restarts-in-job 1"
    said = run_forked(2, flags.split(), tmp_path / "screen", main=faulty)
    assert "RUN FAILED: rank 1 of 2" in said and "it has disagreed 2 times" in said
    events = [json.loads(line) for line in (folder / "run_events.jsonl").read_text().splitlines()]
    told = [event for event in events if event["event"] == "audit"]
    assert [(event["iteration"], event["ranks"], event["disagreements"]) for event in told] == [
        (2, [1], 1),
        (4, [1], 2),
    ]
    assert all(event["first"].startswith("output decoder.layers.0.self_attention.linear_qkv") for event in told)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = records[-1]
    assert (last["iteration"], last["audits"], last["audit_disagreements"]) == (6, 2, 0)
