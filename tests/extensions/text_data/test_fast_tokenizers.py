"""The package `gigatoken` replaces the package `tokenizers` only if both packages return the same ids."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.config.data import TokenizerConfig
from megatron.core.tokenizers import ByteTokenizer
from megatron.extensions.data.text_data.fast_tokenizer import (
    ALWAYS_COMPARED,
    SHARE_COMPARED,
    DifferentIds,
    StandIn,
    stand_in_for,
)
from megatron.extensions.data.tokenizers.huggingface import GPT2BPETokenizer, HuggingFaceTokenizer
from tests.corpus import byte_level
from tests.forked import ROOT
from tools import preprocess_data

pytest.importorskip("gigatoken", reason="gigatoken, an optional package, is not installed")

TEXTS = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests" / "pure").glob("test_*.py"))]
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def saved(folder: Path, around: bool) -> HuggingFaceTokenizer:
    """Return a byte-level BPE tokenizer like GPT-2's. If `around` is True, the tokenizer puts special tokens before and
    after each text."""
    from tokenizers import processors

    tokenizer = byte_level(TEXTS[:10], ["<|endoftext|>", "<s>"], 700)
    if around:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 0), ("<s>", 1)]
        )
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return HuggingFaceTokenizer(TokenizerConfig(tokenizer_model=str(folder)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bpe")


@pytest.fixture(scope="module")
def plain(folder: Path) -> StandIn:
    return stand_in_for(saved(folder / "plain", around=False))


@settings(max_examples=100)
@given(text=UNICODE)
def test_ids_match_for_any_text(plain: StandIn, text: str) -> None:
    assert plain._encode(text).tolist() == plain.reference.tokenize(text)


def test_special_tokens_around_and_within_texts_match(folder: Path) -> None:
    stand_in = stand_in_for(saved(folder / "around", around=True))
    assert (stand_in.prefix.tolist(), stand_in.suffix.tolist()) == ([1], [0])
    ids = stand_in.tokenize("a <s> b")
    assert ids.tolist() == stand_in.reference.tokenize("a <s> b") and ids.tolist().count(1) == 2


def test_gpt2_files_match(folder: Path) -> None:
    """GPT-2's tokenizer treats <|endoftext|> within a text as plain text."""
    from tokenizers import ByteLevelBPETokenizer

    trainer = ByteLevelBPETokenizer()
    trainer.train_from_iterator(TEXTS[:3], vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False)
    trainer.save_model(str(folder))
    files = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
    tokenizer = GPT2BPETokenizer(TokenizerConfig(**files))
    ids = stand_in_for(tokenizer).tokenize("x<|endoftext|>y")
    assert ids.tolist() == tokenizer.tokenize("x<|endoftext|>y") and tokenizer.eod not in ids


def test_unsupported_tokenizers_are_not_replaced() -> None:
    with pytest.raises(DifferentIds, match="not ByteTokenizer"):
        stand_in_for(ByteTokenizer())


def test_the_reason_is_reported_in_one_line(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DifferentIds) as caught:
        stand_in_for(HuggingFaceTokenizer(TokenizerConfig(tokenizer_model=str(tmp_path))))
    assert "gigatoken does not support this tokenizer: " in str(caught.value) and "\n" not in str(caught.value)


def test_differences_are_detected_at_startup_and_later(plain: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = StandIn._encode
    monkeypatch.setattr(StandIn, "_encode", lambda self, text: encode(self, text.replace("quick", "slow")))
    with pytest.raises(DifferentIds, match="a quick fox"):
        plain.tokenize("a quick fox")
    plain.seen = plain.compared = ALWAYS_COMPARED
    with pytest.raises(DifferentIds):
        tokenize_often(plain, "another quick fox" * 40)
    assert ALWAYS_COMPARED < plain.seen < 3 * SHARE_COMPARED * ALWAYS_COMPARED


def tokenize_often(tokenizer: StandIn, text: str) -> None:
    for _ in range(2 * SHARE_COMPARED * ALWAYS_COMPARED // len(text)):
        tokenizer.tokenize(text)


def run(folder: Path, prefix: str, *flags: str) -> list[np.ndarray]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in [*TEXTS, ""]))
    model = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder / "plain"), "--append-eod")
    files = ("--input", str(folder / "in.jsonl"), "--output-prefix", str(folder / prefix))
    assert preprocess_data.main([*files, *model, *flags]) == 0
    dataset = IndexedDataset(str(folder / f"{prefix}_text_document"))
    return [np.array(dataset[i]) for i in range(len(dataset))]


@pytest.mark.usefixtures("plain")
def test_preprocessing_gives_the_same_data_with_both(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fast = run(folder, "fast", "--bpe-backend", "gigatoken")
    assert "by gigatoken; ids of" in capsys.readouterr().out
    slow = run(folder, "slow", "--bpe-backend", "tokenizers")
    assert "gigatoken" not in capsys.readouterr().out
    assert len(fast) == len(TEXTS) and sum(map(len, fast)) > 10000
    assert all(np.array_equal(a, b) for a, b in zip(fast, slow, strict=True))


@pytest.mark.usefixtures("plain")
def test_preprocessing_restarts_where_ids_differ(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = StandIn._encode
    monkeypatch.setattr(StandIn, "_encode", lambda self, text: encode(self, text.replace("pytest", "another")))
    again = run(folder, "again")
    assert "starting again with tokenizers" in capsys.readouterr().err
    monkeypatch.undo()
    assert all(np.array_equal(a, b) for a, b in zip(again, run(folder, "right"), strict=True))
    monkeypatch.setattr(StandIn, "_encode", lambda self, text: encode(self, text.replace("pytest", "another")))
    with pytest.raises(ValueError, match=r"--bpe-backend gigatoken: gigatoken and tokenizers encode .* differently"):
        run(folder, "refused", "--bpe-backend", "gigatoken")
    assert not (folder / "refused_text_document.bin").exists()
