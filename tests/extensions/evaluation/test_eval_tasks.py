"""Task files: their requests, rows and scores, against those of lm-evaluation-harness, and what is wrong with them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron.core.parallel_state import Axis
from megatron.core.tokenizers import ByteTokenizer
from megatron.extensions.evaluation.metrics import FILTERS, choice_scores, exact_match, mean_of_tasks, standard_error
from megatron.extensions.evaluation.prompts import build_samples
from megatron.extensions.evaluation.rows import Row, batch_lengths, continuation_row, plan_rounds, rolling_rows
from megatron.extensions.evaluation.scoring import Score, continue_requests, greedy_request, most_likely
from megatron.extensions.evaluation.suite import Suite
from megatron.extensions.evaluation.task_file import read_tasks
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve, validate
from tests.extensions.evaluation.test_eval_task_layouts import MODEL, TASKS
from tests.rules import problems

TOKENIZER = ByteTokenizer()
DOCUMENTS = [{"q": f"question {n}", "a": "yes" if n % 2 else "no"} for n in range(6)]
GOOD: dict[str, Any] = {
    "task": "good",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "good.jsonl"}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{q}}",
    "doc_to_target": "a",
    "doc_to_choice": ["yes", "no"],
}

WRONG = yaml.safe_load(Path(__file__).with_name("wrong_tasks.yaml").read_text(encoding="utf-8"))


def written(folder: Path, name: str = "good", documents: Any = DOCUMENTS, **changes: Any) -> Path:
    """A task file of `GOOD` with changes; None removes a key. JSON is YAML too."""
    values = {key: value for key, value in (GOOD | changes).items() if value is not None}
    (folder / "good.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents))
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(values))
    return path


def suite(path: Path, **options: Any) -> Suite:
    return Suite.load([str(path)], TOKENIZER, options.pop("longest", 256), **options)


def test_requests_are_those_of_the_harness() -> None:
    """Its first requests of these files; `lm_eval_oracle` compares all, where the harness is installed."""
    tasks = {task.name: build_samples(task) for task in read_tasks([str(TASKS)])[0]}
    context = "Colours of things.\n\nA crow is black\n\nSnow is white\n\nA lime is green\n\nMilk is"
    assert tasks["colours"][0].requests[0] == (context, " white")
    assert [sample.requests[0][0] for sample in tasks["sums"][:2]] == [
        "6 + 1 = 7\n2 + 1 = 3\n1 + 1 =",
        "1 + 1 = 2\n2 + 1 = 3\n2 + 1 =",
    ]
    start = "The cup did not fit in the bag because "
    assert tasks["pronouns"][0].requests == ((start + "the cup", " was too big."), (start + "the bag", " was too big."))
    assert tasks["pronouns"][0].target == 0
    assert tasks["last_words"][0].requests[0][1] == " door"
    assert [len(samples) for samples in tasks.values()] == [9, 12, 8, 12, 4, 10]


TOLD = [
    *((case["changes"], case["told"]) for case in WRONG),
    ({"documents": [{"q": "", "a": "no"}], "doc_to_choice": ["y" * 300, "no"]}, "tokens is longer than the 256"),
]


@pytest.mark.parametrize(("changes", "told"), TOLD)
def test_what_is_wrong_is_told(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    path = written(tmp_path, **changes)
    with pytest.raises(ValueError, match="--eval-tasks") as error:
        suite(path)
    assert told in str(error.value) and str(path) in str(error.value)


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    paths = [written(tmp_path), written(tmp_path, "again"), written(tmp_path, "bad", output_type="x", metric_list=[])]
    with pytest.raises(ValueError, match="there is no such file") as error:
        read_tasks([*map(str, paths), str(tmp_path / "none.yaml")])
    lines = str(error.value).splitlines()
    assert len(lines) == 3 and any("task 'good' is in" in line for line in lines)
    (tmp_path / "group.yaml").write_text("group: all\ntask: [good, god]\n")
    with pytest.raises(ValueError, match="the group's task 'god' is in no file that is given; nearest: good"):
        read_tasks([str(paths[0]), str(tmp_path / "group.yaml")])


def test_metrics_are_not_judged_where_the_output_type_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="output_type 'choice' is unknown") as error:
        read_tasks([str(written(tmp_path, output_type="choice", metric_list=[{"metric": "acc"}]))])
    assert len(str(error.value).splitlines()) == 1


def test_flags_are_checked(tmp_path: Path) -> None:
    def problems(flags: str) -> str:
        return "\n".join(map(str, validate(parse_args((MODEL + flags).split()), 1)))

    assert problems(f"--eval-tasks {TASKS} --eval-tasks-interval 2") == ""
    assert "there is no such file" in problems(f"--eval-tasks {tmp_path / 'x.yaml'}")
    assert "--eval-tasks-limit 0: must be above 0" in problems(f"--eval-tasks {TASKS} --eval-tasks-limit 0")
    drops = "--num-experts 8 --moe-router-topk 2 --moe-expert-capacity-factor 1 "
    assert "--moe-eval-capacity-factor 4" in problems(f"--eval-tasks {TASKS} {drops}")
    assert "--eval-tasks" not in problems(f"--eval-tasks {TASKS} {drops} --moe-eval-capacity-factor 4")


def test_texts_that_are_too_long_are_cut_on_the_left(tmp_path: Path) -> None:
    row, cut = continuation_row(TOKENIZER, "abcdef ", "gh", 6)
    assert row == Row(tuple(b"cdef gh"), 3) and cut == 2, "the space is the answer's"
    assert continuation_row(TOKENIZER, "", "ab", 6)[0] == Row((256, *b"ab"), 2)
    (note,) = suite(written(tmp_path), longest=10).notes
    assert note == "task good: 12 of 12 requests are too long and are cut on the left"


def test_a_rolling_text_has_each_token_scored_once() -> None:
    rows = list(rolling_rows(TOKENIZER, "abcdefghij", 4))
    assert [row.scored for row in rows] == [4, 4, 2]
    assert [bytes(row.tokens[1:]) for row in rows] == [b"abcd", b"efgh", b"ghij"]
    assert [row.tokens[0] for row in rows] == [256, ord("d"), ord("f")], "the last one is full, and so has context"


def test_batches_hold_each_row_once_and_have_one_shape_on_all_replicas() -> None:
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


def test_scores_of_choices() -> None:
    scores = choice_scores([-4.0, -6.0, -5.0], [False, True, False], ["a", "bbbb", "é"], 1)
    assert (scores["acc"], scores["acc_norm"], scores["acc_bytes"], scores["exact_match"]) == (0.0, 1.0, 1.0, 1.0)
    assert choice_scores([-4.0, -6.0], [False] * 2, ["a", "b"], "c")["acc"] == 0.0, "a target that is no choice"
    assert choice_scores([-4.0, -6.0], [False] * 2, ["a", "b"], [0, 1])["acc"] == 1.0
    assert choice_scores([-4.0, -6.0, -1.0, -5.0], [False] * 4, ["a", "b"], 1)["acc_mutual_info"] == 1.0


def test_standard_errors_and_means_of_groups() -> None:
    values = [1.0, 0.0, 1.0, 1.0]
    assert standard_error("mean", values) == pytest.approx(math.sqrt(0.75 / 3 / 4))
    assert standard_error("mean", [1.0]) is None and standard_error("weighted_perplexity", values) is None
    value, error = mean_of_tasks([0.5, 1.0], [0.1, 0.2], [30, 10], by_size=True)
    pooled = (29 * 0.1**2 * 30 + 9 * 0.2**2 * 10) / 38
    assert (value, error) == (pytest.approx(0.625), pytest.approx(math.sqrt(pooled / 40)))
    assert mean_of_tasks([0.5, 1.0], [0.1, 0.2], [30, 10], by_size=False) == pytest.approx((0.75, math.sqrt(0.05) / 2))


def test_generated_texts_end_and_are_filtered() -> None:
    say = iter(b"answer 42.\nmore")
    request, _ = greedy_request(TOKENIZER, "q", {"until": "\n", "max_gen_toks": 30}, "", 64)
    (text,) = continue_requests([request], TOKENIZER, lambda texts: [next(say)])
    assert text == "answer 42." and next(say) == ord("m"), "not a token more"
    assert FILTERS["regex"](regex_pattern=r"(\d+)|(\w+)", group_select=-1)(text) == "42"
    assert FILTERS["regex"](regex_pattern=r"\d")("none") == "[invalid]"
    assert exact_match("Yes!", ["yes"], {"ignore_case": True, "ignore_punctuation": True}) == 1.0
    (ended,) = continue_requests([request], TOKENIZER, lambda texts: [TOKENIZER.eod])
    assert ended == ""


def test_a_suite_scores_what_a_model_says() -> None:
    """A model that likes the letter e: each row's score is the number of them among its scored tokens."""
    loaded = Suite.load([str(TASKS)], TOKENIZER, 256)

    def score(rows: Any) -> list[Score]:
        assert len(set(rows)) == len(rows), "no row twice"
        return [Score(float(row.tokens[-row.scored :].count(ord("e"))), True, 0) for row in rows]

    results = loaded.evaluate(score, lambda requests: [" 3\n"] * len(requests))
    found = {each.key: each for each in results.scores}
    assert found["eval/colours/acc"].value == pytest.approx(1 / 9), (
        "of all colours, green has most, and a leaf alone is"
    )
    assert found["eval/last_words/acc"].value == 1.0
    assert found["eval/sums/exact_match,whole"].value == found["eval/sums/exact_match,number"].value == 0.1
    group = found["eval/animals_and_words/acc"]
    assert (group.documents, group.num_fewshot) == (24, None)
    assert group.value == pytest.approx((found["eval/sounds/acc"].value + 1) / 2)
    assert {sample["task"] for sample in results.samples} == {each.task.name for each in loaded.tasks}


def test_functions_and_folders_of_data(tmp_path: Path) -> None:
    """`!function` beside the file, and a folder of the splits' files."""
    (tmp_path / "own.py").write_text(
        "def shout(doc):\n    return doc['q'].upper()\n"
        "def some(docs):\n    return docs.filter(lambda doc: doc['a'] == 'no').map(lambda doc: {'n': 1})\n"
    )
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "test-00000.csv").write_text("q,a\nfirst,no\nsecond,yes\n")
    path = written(tmp_path, dataset_path="data", dataset_kwargs=None)
    text = path.read_text().replace('"{{q}}"', "!function own.shout").rstrip("}")
    path.write_text(text + ', "process_docs": !function own.some}')
    (task,), _ = read_tasks([str(path)])
    assert [sample.requests[0] for sample in build_samples(task)] == [("FIRST", " yes")]


def test_the_most_likely_token_leaves_padding_out() -> None:
    logits = torch.tensor([[[0.0, 2.0, 2.0, 9.0]]])
    assert most_likely(logits, Axis(), 3).tolist() == [[1]]


def test_an_evaluation_of_tasks_alone_needs_no_data() -> None:
    flags = f"--skip-train --tokenizer-type ByteTokenizer --vocab-size 257 --eval-tasks {TASKS}"
    model = "--num-layers 4 --hidden-size 48 --num-attention-heads 12 --seq-length 16"
    assert problems(flags, base=model) == problems(f"{flags} --eval-iters 0") == []
    resolved = resolve(parse_args(f"{model} {flags}".split()), 1)
    assert resolve(resolved, 1) == resolved
    assert (resolved.data.mock_data, resolved.training.eval_iters, resolved.training.train_iters) == (True, 0, 1)
