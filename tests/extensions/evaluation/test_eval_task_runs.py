"""Tests of `--eval-tasks` on the command line, with the six tasks of tests/fixtures, both during training and on a
finished checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.extensions.observe.evaluation.harness import Suite, record_of
from tests.corpus import byte_level
from tests.extensions.evaluation.test_eval_task_layouts import LLAMA, TASKS
from tests.forked import run_forked, run_program

RUN = f"{LLAMA.replace('--seq-length 64', '--seq-length 256')} --eval-tasks {TASKS} --eval-tasks-limit 2".split()

EVALUATION = " ".join(RUN).replace("--lr 1e-2", "").replace("--mock-data --train-iters 3", "").split()
"""Flags of an evaluation-only run: `RUN` without the flags that only training needs."""


def scores(folder: Path) -> dict[str, float]:
    """Return the metrics of the newest task record, except times."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [record for record in records if "eval_tasks_seconds" in record]
    return {key: value for key, value in found[-1].items() if key not in ("time", "eval_tasks_seconds")}


def nearly(resps: Any, relative: float) -> Any:
    """Replace all floats in nested results with `pytest.approx`, so that log-likelihoods compare equal up to
    rounding."""
    if isinstance(resps, list | tuple):
        return type(resps)(nearly(each, relative) for each in resps)
    return pytest.approx(resps, rel=relative) if isinstance(resps, float) else resps


def test_a_checkpoint_of_tp_2_pp_2_has_the_same_scores_in_one_process(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    save, alone, board = tmp_path / "save", tmp_path / "alone", tmp_path / "board"
    layout = ["--tp", "2", "--pp", "2", "--sequence-parallel"]
    more = ["--eval-tasks-interval", "0", "--eval-tasks-samples", str(save / "documents")]
    said = run_forked(4, [*RUN, *layout, *more, "--save", str(save)], tmp_path / "screen")
    assert said.count("tasks after iteration 3") == 1 and "|colours" in said
    found = scores(save)
    assert found["iteration"] == 3 and {"eval/colours/acc", "eval/sums/exact_match,number"} <= found.keys()
    assert {"eval/colours/acc_stderr", "eval/sums/exact_match_stderr,number"} <= found.keys()
    finished = ["--skip-train", "--load", str(save), "--save", str(alone), "--tensorboard-dir", str(board)]
    finished += ["--eval-tasks-samples", str(alone / "documents")]
    said = run_forked(1, [*EVALUATION, *finished], tmp_path / "screen")
    assert scores(alone) == pytest.approx(found, rel=1e-9)
    files = (folder / "documents" / "iteration_0000003.jsonl" for folder in (save, alone))
    one, other = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    assert len(one) == len(other) == 7 * 2, "sums has two filters"
    for document, again in zip(one, other, strict=True):
        assert again["resps"] == nearly(document["resps"], 1e-9)
    events = EventAccumulator(str(board))
    events.Reload()
    (event,) = events.Scalars("eval/stories/bits_per_byte")
    assert event.step == 3 and event.value == pytest.approx(found["eval/stories/bits_per_byte"])


def test_a_bad_task_file_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("task: bad\ndoc_to_txt: x\n")
    flags = [*RUN, "--eval-tasks", str(tmp_path / "bad.yaml"), "--save", str(tmp_path)]
    said = run_forked(1, flags, tmp_path / "screen", code=2)
    assert "unexpected keyword argument 'doc_to_txt'" in said


def test_the_harness_gives_the_same_scores_for_the_exported_model(tmp_path: Path) -> None:
    """The evaluation harness runs its transformers model on the exported checkpoint, and the model type "megatron" on
    the original checkpoint."""
    from lm_eval.models.huggingface import HFLM

    from megatron.lm_eval_model.model import CheckpointLM

    save, hf, tokenizer = tmp_path / "save", tmp_path / "hf", tmp_path / "tokenizer"
    tokenizer.mkdir()
    byte_level(special=["<|endoftext|>"]).save(str(tokenizer / "tokenizer.json"))
    special = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(special))
    flags = LLAMA.replace("--fp64", "--fp32").replace(
        "ByteTokenizer", f"HuggingFaceTokenizer --tokenizer-model {tokenizer}"
    )
    run_forked(1, [*flags.split(), "--hidden-dropout", "0", "--save", str(save)], tmp_path / "screen")
    run_program("tools/convert_checkpoint.py", "--input", save, "--output", hf, "--dtype", "float32", code=0)
    model = CheckpointLM(checkpoint=str(save))
    suite = Suite.load([str(TASKS)], model.tokenizer, model.scorer.longest)
    theirs = HFLM(pretrained=str(hf), dtype="float32", max_length=64, batch_size=4, device="cpu")
    found, expected = suite.evaluate(model), suite.evaluate(theirs)
    assert record_of(found) == pytest.approx(record_of(expected), rel=1e-4)
    for task, documents in expected["samples"].items():
        for document, again in zip(documents, found["samples"][task], strict=True):
            assert again["resps"] == nearly(document["resps"], 1e-4)
