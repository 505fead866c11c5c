"""Tests of tools/generate_text.py with a trained checkpoint: prompts, JSON lines and chat, under several layouts."""

from __future__ import annotations

import io
import json
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.extensions.inference.conftest import TRAINING
from tests.forked import run_forked
from tools.common import run_tool
from tools.generate_text import main


def test_several_prompts_are_answered_in_order(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--load", checkpoint, "--device", "cpu", "--max-new-tokens", "6"]
    assert main([*flags, "--prompt", "one", "a longer prompt", ""]) == 0
    first, second, third = capsys.readouterr().out.split("-" * 40 + "\n")
    assert first.startswith("one") and second.startswith("a longer prompt") and third
    assert main([*flags, "--prompt", "one", "--prompt", "a longer prompt", "", "--batch-size", "1"]) == 0
    assert capsys.readouterr().out.split("-" * 40 + "\n") == [first, second, third]


def test_json_lines_of_standard_input_are_answered(
    checkpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for seed in ("1", "1", "2"):
        monkeypatch.setattr("sys.stdin", io.StringIO("alpha\n\nbeta\n"))
        flags = ["--load", checkpoint, "--device", "cpu", "--max-new-tokens", "6", "--top-k", "50", "--seed", seed]
        assert main(flags) == 0
        found.append(capsys.readouterr().out)
    assert "alpha" in found[0] and "beta" in found[0]
    assert found[0] == found[1] != found[2]


def test_the_tokenizer_is_read_from_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import sentencepiece

    (tmp_path / "a.txt").write_text("one two three four five\n" * 20)
    options = {"input": str(tmp_path / "a.txt"), "model_prefix": str(tmp_path / "m"), "vocab_size": 18}
    sentencepiece.SentencePieceTrainer.train(**options, minloglevel=2)
    named = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(tmp_path / "m.model")]
    flags = [flag for flag in TRAINING if flag not in ("--tokenizer-type", "ByteTokenizer")]
    run_forked(1, [*flags, *named, "--save", str(tmp_path / "run")], tmp_path / "screen")
    (tmp_path / "m.model").unlink()
    (tmp_path / "run").rename(tmp_path / "moved")
    for load in ("moved", "moved/iter_0000001"):
        assert main(["--load", str(tmp_path / load), "--device", "cpu", "--prompt", "one two"]) == 0
        assert capsys.readouterr().out.startswith("one two")


def test_a_prompt_that_is_too_long_does_not_stop_the_others(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--load", checkpoint, "--device", "cpu", "--max-new-tokens", "4", "--prompt", "x" * 60, "one"]
    assert main(flags) == 2
    said = capsys.readouterr()
    assert said.out.startswith("one") and "has 60 tokens, but the model reads at most 48" in said.err


MISTAKES = [
    (["--prompt", "x", "--top-p", "2"], "--top-p 2.0 must be above 0"),
    (["--prompt", "x", "--tokenizer-model", "x.model"], "--tokenizer-model needs --tokenizer-type"),
    (["--prompt", "x", "--load", "/nowhere"], "/nowhere is missing: there is no such file or folder; give"),
    (["--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens 0: must be at least 1"),
    (["--context-parallel-size", "2"], "unrecognized arguments: --context-parallel-size"),
    (["--jsonl", "x", "--chat", "--system", "s"], "--jsonl and --chat cannot be combined"),
    (["--token-ids"], "--token-ids needs --jsonl"),
]


@pytest.mark.parametrize(("flags", "message"), MISTAKES)
def test_user_errors_are_explained(
    checkpoint: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run_tool(lambda: main(["--load", checkpoint, "--device", "cpu", *flags]))
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


REQUESTS: list[dict[str, Any]] = [
    {"prompt": "a longer prompt", "max_new_tokens": 5, "id": "first", "logprobs": 1, "token_ids": True},
    {"prompt": "né", "temperature": 1.5, "seed": 7, "top_p": 0.9, "id": 2},
    {"prompt": [97, 98], "max_new_tokens": 10**9},
    {"prompt": "né", "temperature": 1.5, "seed": 7, "top_p": 0.9},
    {"prompt": "x", "max_new_tokens": 0, "logprobs": 0, "prompt_logprobs": True},
    {"prompt": "another", "temperature": 1.0},
]
WRONG: list[tuple[bytes, str]] = [
    (b'{"prompt": "\xff"}', "is not UTF-8: byte 12"),
    (b"{", "is not JSON"),
    (b"[1]", "must be a JSON object, not [1]"),
    (b"[" * 100_000, "is not JSON: it nests too deeply"),
    (b'{"prompt": "x", "temprature": 1, "seed": -1}', "temprature is not a field of this request; did you mean temper"),
    (b'{"id": 5}', "prompt must be given if messages is not given"),
    (b'{"prompt": 5}', "prompt must be a text or a list of token ids"),
    (b'{"prompt": []}', "has no tokens"),
    (b'{"prompt": [257]}', "tokens must be from 0 to 256"),
    (b'{"prompt": "x", "stop": ["a", ""]}', "stop must be a nonempty text or a list of nonempty texts"),
    (b'{"prompt": "x", "top_p": 0, "temperature": NaN}', "top_p 0.0 must be above 0"),
    (b'{"prompt": "x", "max_new_tokens": 1.5}', "max_new_tokens must be a whole number of at least 0, not 1.5"),
    (b'{"prompt": "' + b"x" * 60 + b'"}', "has 60 tokens, but the model reads at most 48"),
    (b'{"messages": [{"role": "user", "content": "hi"}]}', "has no chat template"),
]


def answers(checkpoint: str, folder: Path, lines: list[bytes], *flags: str, ranks: int = 1, code: int = 0) -> list[Any]:
    (folder / "in.jsonl").write_bytes(b"\n".join(lines) + b"\n\n")
    files = ["--jsonl", str(folder / "in.jsonl"), "--output", str(folder / "out.jsonl")]
    argv = ["--load", checkpoint, "--device", "cpu", *files, *flags]
    if ranks == 1:
        assert main(argv) == code
    else:
        run_forked(ranks, argv, folder / "screen", code, main=lambda argv: run_tool(partial(main, argv)))
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def encoded(requests: list[dict[str, Any]]) -> list[bytes]:
    return [json.dumps(request).encode() for request in requests]


def test_answers_are_in_the_order_of_requests_under_every_layout(checkpoint: str, tmp_path: Path) -> None:
    first, second, third, fourth, fifth, sixth = found = answers(checkpoint, tmp_path, encoded(REQUESTS))
    assert [each["finish_reason"] for each in found] == ["length"] * 6
    assert first["id"] == "first" and len(first["token_ids"]) == len(first["logprobs"]) == 5
    assert bytes(first["prompt_token_ids"]) == b"a longer prompt"
    assert first["logprobs"][0]["top"][0]["token_id"] == first["token_ids"][0]
    assert second["text"] == fourth["text"] and second["id"] == 2 and "id" not in fourth
    assert "token_ids" not in third and third["text"]
    assert fifth["text"] == "" and fifth["prompt_logprobs"] == []
    # sampling depends on the line number of a request
    assert sixth["text"] != answers(checkpoint, tmp_path, encoded(REQUESTS[5:]))[0]["text"]
    alone = answers(checkpoint, tmp_path, encoded(REQUESTS), "--batch-size", "1")
    layout = answers(checkpoint, tmp_path, encoded(REQUESTS), "--tp", "2", "--pp", "2", ranks=4)
    for others in (alone, layout):
        assert_same(others, deepcopy(found))


def test_a_wrong_line_gets_an_error_and_does_not_stop_the_others(checkpoint: str, tmp_path: Path) -> None:
    lines = [b'{"prompt": "a", "id": 1}', *(line for line, _ in WRONG), b'{"prompt": "b"}']
    found = answers(checkpoint, tmp_path, lines, "--max-new-tokens", "2", code=2)
    assert found[0]["id"] == 1 and found[0]["text"] and found[-1]["text"]
    for number, ((_, message), each) in enumerate(zip(WRONG, found[1:-1], strict=True), 2):
        assert message in each["error"] and each["line"] == number


def assert_same(found: list[Any], expected: list[Any]) -> None:
    """Assert that generated answers are equal, and that their log-probabilities are equal up to rounding."""
    for one, other in zip(found, expected, strict=True):
        ours, theirs = (each.pop("logprobs", []) for each in (one, other))
        assert [each["token_id"] for each in ours] == [each["token_id"] for each in theirs]
        assert [each["logprob"] for each in ours] == pytest.approx([each["logprob"] for each in theirs], abs=1e-12)
    assert found == expected


def test_invalid_layouts_are_refused_once(checkpoint: str, tmp_path: Path) -> None:
    argv = ["--load", checkpoint, "--device", "cpu", "--prompt", "a"]
    for flags, message in (
        ("--tensor-model-parallel-size 4", "must be 4: PP 1 times the least common multiple of TP 4"),
        ("--pipeline-model-parallel-size 2 --expert-model-parallel-size 2", "must be 4"),
        ("--expert-model-parallel-size 2", "--expert-model-parallel-size"),
    ):
        screen = run_forked(
            2, [*argv, *flags.split()], tmp_path / "screen", 2, main=lambda argv: run_tool(partial(main, argv))
        )
        assert message in screen
        assert screen.count("error: ") == 1, screen
    with pytest.raises(ValueError, match="is the file of --jsonl"):
        main(["--load", checkpoint, "--jsonl", __file__, "--output", __file__])


def test_chat_messages_are_answered(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for each in messages %}{{ each.role[0] }}{{ each.content }}{% endfor %}a")
    flags = ["--load", checkpoint, "--device", "cpu", "--chat", "--max-new-tokens", "4"]
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nlonger\n" + "x" * 30 + "\n" + "y" * 60 + "\nend"))
    assert main([*flags, "--chat-template", str(template), "--system", "S"]) == 0
    out = capsys.readouterr().out
    first = answers(checkpoint, tmp_path, [b'{"prompt": "sSuhia", "max_new_tokens": 4}'])[0]["text"]
    assert out.startswith(first + "\n")
    assert "[has 64 tokens, but the model reads at most 48" in out and out.count("\n") >= 5
    with pytest.raises(ValueError, match="--tokenizer-type ByteTokenizer has no chat template"):
        main(flags)
