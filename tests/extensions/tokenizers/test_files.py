"""Tokenizers of files: what goes in comes back, special tokens are where Megatron has them, mistakes are named."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.config.data import TokenizerConfig
from megatron.core.tokenizers import build_tokenizer

ROOT = Path(__file__).parents[3]
TEXT = "The quick brown fox jumps over the lazy dog.\n    def f(x):\n        return x + 1  # café\n"
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def build(kind, vocab_size=None, **kwargs):
    return build_tokenizer(TokenizerConfig(tokenizer_type=kind, **kwargs), vocab_size)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(scope="module")
def sentencepiece_model(folder):
    """A model trained by the tool, which has <EOD>."""
    (folder / "text.txt").write_text(TEXT * 50)
    command = [sys.executable, str(ROOT / "tools" / "train_tokenizer.py"), "--input", str(folder / "text.txt")]
    command += ["--vocab-size", "300", "--output-prefix", str(folder / "own")]
    subprocess.run(command, check=True, capture_output=True)
    return str(folder / "own.model")


@pytest.fixture(scope="module")
def foreign_model(folder):
    """A SentencePiece model without <EOD>, as Llama's."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.split("\n") * 50),
        model_prefix=str(folder / "foreign"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    return str(folder / "foreign.model")


@pytest.fixture(scope="module")
def gpt2_files(folder):
    from tokenizers import ByteLevelBPETokenizer

    trainer = ByteLevelBPETokenizer()
    trainer.train_from_iterator([TEXT] * 20, vocab_size=320, special_tokens=["<|endoftext|>"], show_progress=False)
    trainer.save_model(str(folder))
    return {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}


@given(text=UNICODE)
def test_own_sentencepiece_model_loses_nothing(sentencepiece_model, text):
    tokenizer = build("SentencePieceTokenizer", tokenizer_model=sentencepiece_model)
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_own_sentencepiece_model_ends_documents_with_its_own_token(sentencepiece_model):
    tokenizer = build("SentencePieceTokenizer", tokenizer_model=sentencepiece_model)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.bos, tokenizer.eos) == (300, 4, 1, 2)
    assert max(tokenizer.tokenize(TEXT)) < 300
    assert tokenizer.detokenize([*tokenizer.tokenize("one"), 4, *tokenizer.tokenize("two")]) == "one<EOD>two"


def test_foreign_sentencepiece_model_gets_megatrons_special_tokens(foreign_model):
    tokenizer = build("SentencePieceTokenizer", tokenizer_model=foreign_model)
    assert tokenizer.vocab_size == 304 and tokenizer.eod == 302  # <CLS> 300, <SEP> 301, <EOD> 302, <MASK> 303
    assert tokenizer.detokenize([*tokenizer.tokenize("fox"), 302]) == "fox<EOD>"
    assert max(tokenizer.tokenize("text that spells <EOD> and </s>")) < 300


def test_llama2_begins_with_bos_and_ends_documents_with_eos(foreign_model):
    tokenizer = build("Llama2Tokenizer", tokenizer_model=foreign_model)
    ids = tokenizer.tokenize("the fox")
    assert ids[0] == tokenizer.bos == 1
    assert tokenizer.tokenize("the fox", bos=False, eos=True) == [*ids[1:], 2]
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.eos) == (300, 2, 2)
    assert tokenizer.detokenize(ids) == "the fox"


@given(text=UNICODE)
def test_gpt2_bpe_loses_nothing(gpt2_files, text):
    tokenizer = build("GPT2BPETokenizer", **gpt2_files)
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize(ids) == text


def test_gpt2_bpe_equals_the_one_of_transformers(gpt2_files):
    transformers = pytest.importorskip("transformers")
    reference = transformers.GPT2Tokenizer(gpt2_files["vocab_file"], gpt2_files["merge_file"])
    tokenizer = build("GPT2BPETokenizer", **gpt2_files)
    for text in (TEXT, "  Hello,   world!\n\n", "漢字 😀", "don't stop 1234"):
        assert tokenizer.tokenize(text) == reference(text)["input_ids"]
    vocab = json.loads(Path(gpt2_files["vocab_file"]).read_text())
    assert tokenizer.eod == vocab["<|endoftext|>"] and tokenizer.vocab_size == len(vocab)


def test_hugging_face_file_and_folder(folder, gpt2_files):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE.from_file(gpt2_files["vocab_file"], gpt2_files["merge_file"]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|begin|>", "<|stop|>"])
    home = folder / "hf"
    home.mkdir()
    tokenizer.save(str(home / "tokenizer.json"))
    alone = build("HuggingFaceTokenizer", tokenizer_model=str(home / "tokenizer.json"))
    names = {"bos_token": "<|begin|>", "eos_token": {"content": "<|stop|>", "lstrip": False}}
    (home / "tokenizer_config.json").write_text(json.dumps(names))
    configured = build("HuggingFaceTokenizer", tokenizer_model=str(home))
    assert alone.eod == tokenizer.token_to_id("<|endoftext|>") and alone.bos is None
    assert configured.eod == configured.eos == tokenizer.token_to_id("<|stop|>")
    assert configured.bos == tokenizer.token_to_id("<|begin|>")
    assert configured.vocab_size == tokenizer.get_vocab_size()
    assert configured.tokenize(TEXT) == tokenizer.encode(TEXT).ids
    assert configured.detokenize(configured.tokenize(TEXT)) == TEXT
    for damaged in (b'{"eos_token": ', b"\xff", b"[1]", b"[" * 100_000):
        (home / "tokenizer_config.json").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"tokenizer_config\.json is not .*JSON.*get the file again"):
            build("HuggingFaceTokenizer", tokenizer_model=str(home))


def test_hugging_face_name_in_the_cache(tmp_path, gpt2_files, monkeypatch):
    from huggingface_hub import constants
    from tokenizers import Tokenizer, models

    name, cache = "some-lab/Model-1.5", tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))  # HF_HUB_CACHE and HF_HOME are read on import
    monkeypatch.chdir(tmp_path)
    said = r"--tokenizer-model some-lab/Model-1\.5: .* run hf download some-lab/Model-1"
    with pytest.raises(ValueError, match=said) as e:
        build("HuggingFaceTokenizer", tokenizer_model=name)
    assert str(cache) in str(e.value) and "\n" not in str(e.value)

    def save(folder, eos):
        folder.mkdir(parents=True)
        tokenizer = Tokenizer(models.BPE.from_file(gpt2_files["vocab_file"], gpt2_files["merge_file"]))
        tokenizer.add_special_tokens(["<|stop|>"])
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        return tokenizer.token_to_id(eos)

    stop = save(cache / "models--some-lab--Model-1.5/snapshots/abc", "<|stop|>")
    (cache / "models--some-lab--Model-1.5/refs").mkdir()
    (cache / "models--some-lab--Model-1.5/refs/main").write_text("abc")
    assert build("HuggingFaceTokenizer", tokenizer_model=name).eod == stop
    end = save(tmp_path / name, "<|endoftext|>")
    assert end != stop and build("HuggingFaceTokenizer", tokenizer_model=name).eod == end


MISTAKES = [
    ("SentencePieceTokenizer", {}, ["needs --tokenizer-model FILE"]),
    ("Llama2Tokenizer", {"tokenizer_model": "/no/x"}, ["--tokenizer-model /no/x: there is no such file"]),
    ("Llama2Tokenizer", {"tokenizer_model": __file__}, ["not a SentencePiece model"]),
    ("HuggingFaceTokenizer", {"tokenizer_model": str(ROOT)}, ["there is no", "tokenizer.json"]),
    ("HuggingFaceTokenizer", {"tokenizer_model": __file__}, ["not a tokenizer.json"]),
    ("HuggingFaceTokenizer", {"tokenizer_model": "/no/x"}, ["there is no /no/x; use"]),
    ("GPT2BPETokenizer", {"merge_file": "/no/m"}, ["needs --vocab-file FILE", "--merge-file /no/m: there is no"]),
    ("GPT2BPETokenizer", {"merge_file": __file__, "vocab_file": __file__}, ["must be GPT-2's vocab.json"]),
]


@pytest.mark.parametrize(("kind", "kwargs", "messages"), MISTAKES)
def test_mistakes_are_named(kind, kwargs, messages):
    with pytest.raises(ValueError, match="--") as caught:
        build(kind, **kwargs)
    for message in messages:
        assert message in str(caught.value)
