"""Tests of evaluation-harness tasks: requests, batching, scores, and errors in task files."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.core.config.data import TokenizerConfig
from megatron.core.parallel_state import Axis
from megatron.core.tokenizers import ByteTokenizer, build_tokenizer
from megatron.extensions.observe.evaluation.continuation import continue_requests, greedy_request
from megatron.extensions.observe.evaluation.harness import ParallelLM, Suite, record_of
from megatron.extensions.observe.evaluation.rows import (
    Row,
    Score,
    batch_lengths,
    continuation_row,
    plan_rounds,
    rolling_rows,
)
from megatron.extensions.observe.evaluation.scoring import most_likely
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve
from tests.corpus import ending_texts
from tests.extensions.evaluation.test_eval_task_layouts import MODEL, TASKS
from tests.rules import problems

TOKENIZER = ByteTokenizer()
GOOD: dict[str, Any] = {
    "task": "good",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{q}}",
    "doc_to_target": "a",
    "doc_to_choice": ["yes", "no"],
}


def written(folder: Path, name: str = "good", **changes: Any) -> Path:
    """Write a task file with the contents of `GOOD` and the given changes. The file is written as JSON, which is valid
    YAML."""
    data = folder / "good.jsonl"
    data.write_text("".join(json.dumps({"q": f"question {n}", "a": "yes" if n % 2 else "no"}) + "\n" for n in range(6)))
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(GOOD | {"task": name, "dataset_kwargs": {"data_files": {"test": str(data)}}} | changes))
    return path


def suite(*paths: Path | str, longest: int = 256, **options: Any) -> Suite:
    return Suite.load([str(path) for path in paths], TOKENIZER, longest, **options)


GENERATED = {"output_type": "generate_until", "doc_to_choice": None}
WRONG = [
    ({"doc_to_txt": "x"}, "unexpected keyword argument 'doc_to_txt'"),
    ({"doc_to_text": "{{q"}, "TemplateSyntaxError"),
    ({"dataset_kwargs": {"data_files": {"test": "none.jsonl"}}}, "none.jsonl"),
    ({"doc_to_choice": ["y" * 300, "no"]}, "a continuation of 301 tokens is longer than the 256"),
    (
        GENERATED | {"generation_kwargs": {"do_sample": True, "temperature": 0.5}},
        "decoding is greedy: remove do_sample",
    ),
    (GENERATED | {"generation_kwargs": {"max_gen_toks": 256}}, "max_gen_toks 256 leaves no room"),
]


@pytest.mark.parametrize(("changes", "told"), WRONG)
def test_wrong_task_files_are_reported(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    path = written(tmp_path, **changes)
    with pytest.raises(ValueError, match="--eval-tasks") as error:
        suite(path)
    assert told in str(error.value)


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    good, again, bad = (
        written(tmp_path),
        written(tmp_path, "again", task="good"),
        written(tmp_path, "bad", output_type="x"),
    )
    with pytest.raises(ValueError, match="there are two tasks named 'good'") as error:
        suite(good, again, bad, "no_such_task")
    assert len(str(error.value).splitlines()) == 3 and "no_such_task" in str(error.value)
    (tmp_path / "_base.yaml").write_text("{")
    (tmp_path / "part.yaml").write_text("doc_to_text: x")
    again.unlink()
    with pytest.raises(ValueError, match=r"bad\.yaml") as error:
        suite(tmp_path)
    assert "part.yaml" not in str(error.value), "a file that others include"


def test_flags_are_checked(tmp_path: Path) -> None:
    def found(flags: str) -> str:
        return "\n".join(map(str, problems(flags, base=MODEL)))

    assert found(f"--eval-tasks {TASKS} --eval-tasks-interval 2") == "" == found("--eval-tasks hellaswag")
    assert "there is no such file" in found(f"--eval-tasks {tmp_path / 'x.yaml'}")
    drops = f"--eval-tasks {TASKS} --num-experts 8 --moe-router-topk 2 --moe-expert-capacity-factor 1 "
    assert "--moe-eval-capacity-factor 4" in found(drops)
    assert "--eval-tasks" not in found(f"{drops} --moe-eval-capacity-factor 4")


def test_texts_that_are_too_long_are_cut_on_the_left(tmp_path: Path) -> None:
    row, cut = continuation_row(TOKENIZER, "abcdef ", "gh", 6)
    assert row == Row(tuple(b"cdef gh"), 3) and cut == 2, "the space belongs to the answer"
    assert continuation_row(TOKENIZER, "", "ab", 6)[0] == Row((256, *b"ab"), 2)
    (note,) = suite(written(tmp_path), longest=10).notes
    assert note == "task good: 12 of 12 requests are too long and are truncated on the left"


def test_an_appended_eos_is_removed_from_rows_and_prompts(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", ending_texts(tmp_path, ["<|begin|>"])))
    ids = tokenizer.tokenize("the fox")
    row, cut = continuation_row(tokenizer, "the", " fox", 99)
    assert (list(row.tokens), cut) == (ids[:-1], 0)
    assert tokenizer.detokenize(row.tokens[-row.scored :]) == " fox"
    assert greedy_request(tokenizer, "the fox", {}, 999)[0].prompt == ids[:-1]
    (rolling,) = rolling_rows(tokenizer, "the fox", 99)
    assert rolling.tokens[-1] == ids[-2]


def test_each_token_of_a_rolling_text_is_scored_once() -> None:
    rows = list(rolling_rows(TOKENIZER, "abcdefghij", 4))
    assert [row.scored for row in rows] == [4, 4, 2]
    assert [bytes(row.tokens[1:]) for row in rows] == [b"abcd", b"efgh", b"ghij"]
    assert [row.tokens[0] for row in rows] == [256, ord("d"), ord("f")], (
        "the last window is full, so its first tokens are context"
    )


def test_batches_contain_each_row_once_with_equal_shapes_on_all_replicas() -> None:
    chance = random.Random(0)
    for _ in range(50):
        longest, replicas, budget = chance.choice([64, 96, 128]), chance.randint(1, 5), chance.randint(10, 400)
        allowed = batch_lengths(longest, chance.choice([1, 2, 8]))
        lengths = [chance.randint(1, longest) for _ in range(chance.randint(0, 60))]
        seen = []
        for each in plan_rounds(lengths, allowed, budget, replicas, per_round=3):
            assert each.size == 1 or each.size * each.length <= budget
            assert each.length in allowed and len(each.microbatches) == replicas
            assert 1 <= len(each.microbatches[0]) <= 3
            assert len({len(mine) for mine in each.microbatches}) == 1
            rows = [row for mine in each.microbatches for batch in mine for row in batch]
            assert all(lengths[row] <= each.length for row in rows)
            assert all(len(batch) <= each.size for mine in each.microbatches for batch in mine)
            seen += rows
        assert sorted(seen) == list(range(len(lengths)))


def test_the_most_likely_token_is_never_padding() -> None:
    logits = torch.tensor([[[0.0, 2.0, 2.0, 9.0]]])
    assert most_likely(logits, Axis(), 3).tolist() == [[1]]


def test_a_task_only_evaluation_needs_no_data() -> None:
    flags = f"--skip-train --tokenizer-type ByteTokenizer --vocab-size 257 --eval-tasks {TASKS}"
    model = "--num-layers 4 --hidden-size 48 --num-attention-heads 12 --seq-length 16"
    assert problems(flags, base=model) == problems(f"{flags} --eval-iters 0") == []
    resolved = resolve(parse_args(f"{model} {flags}".split()), 1)
    assert resolve(resolved, 1) == resolved
    assert (resolved.data.mock_data, resolved.training.eval_iters, resolved.training.train_iters) == (True, 0, 1)


def test_generation_ends_at_stop_strings_and_eod() -> None:
    say = iter(b"answer 42.\nmore")
    request, _ = greedy_request(TOKENIZER, "q", {"until": "\n", "max_gen_toks": 30}, 64)
    (text,) = continue_requests([request], TOKENIZER, lambda texts: [next(say)])
    assert text == "answer 42." and next(say) == ord("m"), "no token is generated after the stop string"
    (ended,) = continue_requests([request], TOKENIZER, lambda texts: [TOKENIZER.eod])
    assert ended == ""


def test_a_suite_scores_the_answers_of_a_model() -> None:
    """The score of each row is the number of times that the letter e occurs among its scored tokens, as if the model
    preferred this letter."""
    loaded = suite(TASKS)

    def score(rows: Sequence[Row]) -> list[Score]:
        assert len(set(rows)) == len(rows), "no row occurs twice"
        return [Score(float(row.tokens[-row.scored :].count(ord("e"))), True, 0) for row in rows]

    scorer = mock.Mock(side_effect=score, longest=256)
    model = ParallelLM(TOKENIZER, scorer, lambda requests: [" 3\n"] * len(requests))
    found, again = loaded.evaluate(model), loaded.evaluate(model)
    assert found["samples"] == again["samples"], "the same examples precede each document"
    record = record_of(found)
    assert record["eval/colours/acc"] == pytest.approx(1 / 9), "of all colours, green has most, and a leaf alone is"
    assert record["eval/last_words/acc"] == 1.0
    assert record["eval/sums/exact_match,whole"] == record["eval/sums/exact_match,number"] == 0.1
    assert record["eval/animals_and_words/acc"] == pytest.approx((record["eval/sounds/acc"] + 1) / 2)
    assert {"eval/colours/acc_stderr", "eval/sums/exact_match_stderr,number"} <= record.keys()
