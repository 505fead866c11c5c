"""The text generator, from a checkpoint that training wrote."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tests.extensions.inference.conftest import TRAINING
from tests.forked import run_forked
from tools.common import run_tool
from tools.generate_text import main


def test_several_prompts(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--load", checkpoint, "--device", "cpu", "--max-new-tokens", "6"]
    assert main([*flags, "--prompt", "one", "a longer prompt", ""]) == 0
    first, second, third = capsys.readouterr().out.split("-" * 40 + "\n")
    assert first.startswith("one") and second.startswith("a longer prompt") and third
    assert main([*flags, "--prompt", "one", "--prompt", "a longer prompt", "", "--batch-size", "1"]) == 0
    assert capsys.readouterr().out.split("-" * 40 + "\n") == [first, second, third]


def test_lines_of_standard_input(
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


def test_a_checkpoint_brings_its_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", "x", "--top-p", "2"], "--top-p 2.0 must be above 0"),
        (["--prompt", "x", "--tokenizer-model", "x.model"], "--tokenizer-model needs --tokenizer-type"),
        (["--prompt", "x", "--load", "/nowhere"], "/nowhere is missing: there is no such file or folder; give"),
        (["--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens 0: must be at least 1"),
    ],
)
def test_user_errors(checkpoint: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run_tool(lambda: main(["--load", checkpoint, "--device", "cpu", *flags]))
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_prompt_too_long_does_not_keep_others_from_theirs(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--load", checkpoint, "--device", "cpu", "--max-new-tokens", "4", "--prompt", "x" * 60, "one"]
    assert main(flags) == 2
    said = capsys.readouterr()
    assert said.out.startswith("one") and "has 60 tokens, and the model reads at most 48" in said.err
