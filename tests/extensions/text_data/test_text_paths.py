"""Paths of text: what they hold, and the rules of flags beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.path_kind import kind_of, reader_of, refusal
from megatron.training.config.arguments import parse_args
from megatron.training.config.flags import load_built_in
from megatron.training.config.validation import validate
from tests.forked import run_program

FLAGS = "--num-layers 4 --hidden-size 48 --num-attention-heads 12 --seq-length 16 --lr 1e-3 --train-iters 10"


def test_text_is_told_by_the_names_of_files(tmp_path: Path) -> None:
    load_built_in()
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("a/b/text.jsonl.gz", "T.TXT", "other.gz", ".hidden.txt"):
        (tmp_path / name).write_text("")
    assert [kind_of(tmp_path / name) for name in ("a", "T.TXT", "*.txt")] == ["text"] * 3
    assert [kind_of(tmp_path / name) for name in ("other.gz", "none")] == ["file", "missing"]
    assert reader_of(tmp_path / "a") == reader_of("s3://bucket/folder") == "text" and reader_of("none") is None
    assert "--data-path and tools/preprocess_data.py take text" in refusal("corpus.jsonl", "give a checkpoint")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--data-path a.jsonl", "--data-path a.jsonl: is text, whose tokens need a tokenizer"),
        ("--mock-data --fim-data", "--fim-data: cuts text: it needs a tokenizer; add --tokenizer-type"),
        ("--mock-data --fim-spm-rate 0.2", "--fim-spm-rate 0.2: has no effect without --fim-data"),
        ("--mock-data --fim-rate 1.2", "--fim-rate 1.2: must be in [0, 1]"),
        ("--mock-data --max-bad-lines -1", "--max-bad-lines -1: must not be negative"),
        ("--mock-data --tokenizer-workers 0", "--tokenizer-workers 0: must be above 0"),
        (
            "--mock-data --fim-data --fim-fragment-rate 0.2",
            "--fim-fragment-rate 0.2: has no effect without --fim-split-sample",
        ),
    ],
)
def test_rules(flags: str, expected: str) -> None:
    found = [str(problem) for problem in validate(parse_args([*FLAGS.split(), *flags.split()]), 1)]
    assert any(problem.startswith(expected) for problem in found), found


def test_tools_tell_text_too(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("")
    done = run_program("tools/inspect_checkpoint.py", str(tmp_path / "x.jsonl"))
    assert done.returncode and "x.jsonl is text; give a checkpoint" in done.stdout + done.stderr


def test_a_plan_says_which_text_is_missing(tmp_path: Path) -> None:
    text, more = tmp_path / "x.jsonl", "--dry-run --vocab-size 1000 --tokenizer-type ByteTokenizer"
    done = run_program("pretrain_gpt.py", *FLAGS.split(), *more.split(), "--data-path", str(text))
    assert done.returncode == 2 and f"--data-path {text}: there is no such file; the path is taken from" in done.stderr
