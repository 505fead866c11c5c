"""Fill-in-the-middle only rearranges documents. The random choices of fill-in-the-middle depend on the sample
number."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron.core.config.data import DatasetConfig, TokenizerConfig
from megatron.core.datasets.gpt_dataset import TextDataset
from megatron.core.datasets.sample_format import SampleFormat
from megatron.core.tokenizers import ByteTokenizer, Tokenizer, build_tokenizer
from megatron.extensions.data.text_data.fill_in_middle import FillInMiddle
from megatron.extensions.data.text_data.flags import FillInMiddleConfig
from tests.corpus import byte_level

LENGTH = 96
WORDS = ["alpha", "beta", "gamma é", "delta", "# keep epsilon", "ζ eta"]
PREFIX, MIDDLE, SUFFIX, PAD, END, FILE = range(256, 262)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return a tokenizer with one token per byte and the special tokens of StarCoder."""
    made = byte_level(special=["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<|endoftext|>", "<file>"])
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save(str(folder / "tokenizer.json"))
    named = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder / "tokenizer.json"))
    return build_tokenizer(named)


class Plain(TextDataset):
    """Dataset whose samples consist of complete documents and a last document that is truncated at the end of the
    sample."""

    fingerprint = "plain"

    def __init__(self, tokenizer: Tokenizer, samples: int = 400) -> None:
        self.tokenizer, self.samples, self.format = tokenizer, samples, SampleFormat(LENGTH, tokenizer.eod)

    def origin(self, index: int) -> str:
        return f"plain:{index}"

    def _text(self, index: int) -> NDArray[np.int64]:
        draws = np.random.default_rng(index)
        ids: list[int] = []
        while len(ids) <= LENGTH:
            words = draws.choice(WORDS, size=draws.integers(1, 4))
            ids += [*self.tokenizer.tokenize(" ".join(words)), END]
        return np.array(ids[: LENGTH + 1])


def flags(**config: object) -> DatasetConfig:
    return DatasetConfig().with_options(FillInMiddleConfig(fim_data=True, **config))  # type: ignore[arg-type]


def made(tokenizer: Tokenizer, **config: object) -> FillInMiddle:
    return FillInMiddle(Plain(tokenizer), flags(**config), tokenizer, seed=7)


def documents(text: NDArray[np.int64], at: int = END) -> list[list[int]]:
    return [list(part) for ends, part in groupby(text.tolist(), lambda id: id == at) if not ends]


def restored(ids: list[int]) -> list[int]:
    """Return the original tokens of a document that was rearranged for fill-in-the-middle, in psm or spm order. In spm
    order, there are no tokens between the prefix marker and the suffix marker."""
    if not ids or ids[0] != PREFIX:
        return ids
    suffix, middle = ids.index(SUFFIX), ids.index(MIDDLE)
    before, after, moved = ids[1:suffix], ids[suffix + 1 : middle], ids[middle + 1 :]
    return before + moved + after


def test_documents_are_only_rearranged(tokenizer: Tokenizer) -> None:
    dataset, kinds = made(tokenizer, fim_rate=0.7, fim_spm_rate=0.4), []
    for number in range(len(dataset)):
        before, after = documents(dataset.inner.text(number)), dataset.text(number)
        assert len(after) == LENGTH + 1
        found = documents(after[: len(after) - int((after == PAD).sum())])
        for whole, ids in zip(before, found[:-1], strict=False):  # the last document may be cut
            assert restored(ids) == whole
            kinds.append("spm" if ids[:2] == [PREFIX, SUFFIX] else "psm" if ids[0] == PREFIX else "plain")
    shares = {kind: kinds.count(kind) / len(kinds) for kind in set(kinds)}
    assert shares["plain"] == pytest.approx(0.3, abs=0.05)
    assert shares["spm"] == pytest.approx(0.7 * 0.4, abs=0.1)  # a psm document with an empty prefix looks like spm


def test_a_sample_depends_only_on_seed_and_number(tokenizer: Tokenizer) -> None:
    first, again = made(tokenizer), made(tokenizer)
    backwards = [again.text(number) for number in reversed(range(40))][::-1]
    assert all((first.text(number) == backwards[number]).all() for number in range(40))
    other = FillInMiddle(Plain(tokenizer), flags(), tokenizer, seed=8)
    assert any((first.text(number) != other.text(number)).any() for number in range(40))
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert first.fingerprint == "2d7c43c4775e53f490c56e32df9efbd6", "checkpoints of earlier versions resume"
    nothing = made(tokenizer, fim_rate=0.0)
    assert all((nothing.text(number) == nothing.inner.text(number)).all() for number in range(40))


def test_padding_does_not_count(tokenizer: Tokenizer) -> None:
    text = np.concatenate([np.full(LENGTH - 8, END), [PAD] * 9])
    sample = made(tokenizer).format.sample(text)
    assert sample["loss_mask"] is not None and sample["loss_mask"].sum() == LENGTH - 9


def test_fragments_are_rearranged_and_other_text_stays(tokenizer: Tokenizer) -> None:
    class Files(Plain):
        def _text(self, index: int) -> NDArray[np.int64]:
            parts = [tokenizer.tokenize(text) for text in ("# keep this", "one two", "three four five")]
            ids = [*parts[0], FILE, *parts[1], FILE, *parts[2], END]
            return np.array((ids * 9)[: LENGTH + 1])

    config = flags(fim_rate=1.0, fim_fragment_rate=1.0, fim_split_sample="<file>", fim_no_prefix="# keep")
    text = FillInMiddle(Files(tokenizer), config, tokenizer, seed=1).text(0)
    fragments = documents(np.array(documents(text)[0]), FILE)
    assert fragments[0] == tokenizer.tokenize("# keep this")
    assert [ids[0] for ids in fragments[1:]] == [PREFIX, PREFIX]


def test_a_cut_within_a_character_changes_no_token(tokenizer: Tokenizer) -> None:
    class Cut(Plain):
        def _text(self, index: int) -> NDArray[np.int64]:
            return np.array(tokenizer.tokenize("é" * 80)[1 : LENGTH + 2])

    dataset = FillInMiddle(Cut(tokenizer), flags(fim_rate=1.0), tokenizer, seed=1)
    ids = [id for id in dataset.text(3).tolist() if id < 256]
    assert set(ids) == set(tokenizer.tokenize("é"))


def test_tokens_that_the_tokenizer_lacks_are_all_named() -> None:
    config = flags(fim_eod_token="<none>", fim_split_sample="<file>")
    with pytest.raises(ValueError, match="--fim-prefix-token <fim_prefix>: the tokenizer has no such token") as raised:
        FillInMiddle(Plain(ByteTokenizer(), 1), config, ByteTokenizer(), seed=1)
    flags_of_tokens = ("middle-token", "suffix-token", "pad-token", "eod-token <none>", "split")
    assert all(f"--fim-{flag}" in str(raised.value) for flag in flags_of_tokens)


def test_tokens_are_found_by_name(tmp_path: Path) -> None:
    import sentencepiece

    (tmp_path / "a.txt").write_text("one two three four five\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "a.txt"), model_prefix=str(tmp_path / "m"), vocab_size=19, minloglevel=2,
        user_defined_symbols=["<fim_prefix>"],
    )  # fmt: skip
    for kind in ("SentencePieceTokenizer", "Llama2Tokenizer"):
        found = build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(tmp_path / "m.model")))
        assert found.find("<fim_prefix>") == 3 and found.find("<fim_middle>") is None
