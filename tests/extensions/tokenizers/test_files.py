"""Tests of tokenizers that are read from files. Decoding restores the text, special tokens have the same ids as in
Megatron-LM, and error messages describe the mistake."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.config.data import TokenizerConfig
from megatron.core.tokenizers import added_after, build_tokenizer, tokenize_beginning
from megatron.extensions.data.tokenizers.special_tokens import role_texts
from tests.corpus import ending_texts, hf_folder

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
    """Return a SentencePiece model trained by the tool. The model has an <EOD> token."""
    (folder / "text.txt").write_text(TEXT * 50)
    command = [sys.executable, str(ROOT / "tools" / "train_tokenizer.py"), "--input", str(folder / "text.txt")]
    command += ["--vocab-size", "300", "--output-prefix", str(folder / "own")]
    subprocess.run(command, check=True, capture_output=True)
    return str(folder / "own.model")


@pytest.fixture(scope="module")
def foreign_model(folder):
    """Return a SentencePiece model without <EOD>, like Llama's."""
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
def test_trained_sentencepiece_model_is_lossless(sentencepiece_model, text):
    tokenizer = build("SentencePieceTokenizer", tokenizer_model=sentencepiece_model)
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_trained_sentencepiece_model_ends_documents_with_its_eod_token(sentencepiece_model):
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
def test_gpt2_bpe_is_lossless(gpt2_files, text):
    tokenizer = build("GPT2BPETokenizer", **gpt2_files)
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize(ids) == text


def test_gpt2_bpe_matches_transformers(gpt2_files):
    transformers = pytest.importorskip("transformers")
    reference = transformers.GPT2Tokenizer(gpt2_files["vocab_file"], gpt2_files["merge_file"])
    tokenizer = build("GPT2BPETokenizer", **gpt2_files)
    for text in (TEXT, "  Hello,   world!\n\n", "漢字 😀", "don't stop 1234"):
        assert tokenizer.tokenize(text) == reference(text)["input_ids"]
    vocab = json.loads(Path(gpt2_files["vocab_file"]).read_text())
    assert tokenizer.eod == vocab["<|endoftext|>"] and tokenizer.vocab_size == len(vocab)


def test_hugging_face_file_and_folder_give_the_same_tokenizer(folder, gpt2_files):
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


def test_hugging_face_name_is_found_in_the_cache(tmp_path, gpt2_files, monkeypatch):
    from huggingface_hub import constants
    from tokenizers import Tokenizer, models

    name, cache = "some-lab/Model-1.5", tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))  # HF_HUB_CACHE and HF_HOME are read during import
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


# The following tests read tokenizer files in a Hugging Face folder.

CUT = {
    "truncation": {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 2},
    "padding": {
        **{"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0},
        **{"pad_type_id": 0, "pad_token": "<|endoftext|>"},
    },
}


def test_stored_truncation_padding_and_dropout_are_disabled(tmp_path, caplog):
    plain = build("HuggingFaceTokenizer", tokenizer_model=hf_folder(tmp_path / "plain")).tokenize(TEXT)
    changed = hf_folder(tmp_path / "changed", model={"dropout": 0.5}, **CUT)
    tokenizer = build("HuggingFaceTokenizer", tokenizer_model=changed)
    assert len(plain) > 5 and all(tokenizer.tokenize(TEXT) == plain for _ in range(5))
    assert tokenizer.tokenize("fox") == build("HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "plain")).tokenize(
        "fox"
    )
    assert caplog.text.count("dropout 0.5 of its model, which segments text at random, is disabled") == 1
    assert '"truncation":null,"padding":null' in tokenizer.to_json().replace(" ", "").replace("\n", "")


def named(content, **flags):
    return {"__type": "AddedToken", "content": content, "lstrip": False, "rstrip": False, **flags}


def listed(content, **flags):
    return {"content": content, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False, **flags}


CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
FOLDERS = {
    "a role adds its token": {CONFIG: {"eos_token": "<|im_end|>"}},
    "a role of properties": {CONFIG: {"eos_token": named("<|im_end|>", rstrip=True), "bos_token": "<|endoftext|>"}},
    "decoder": {CONFIG: {"eos_token": "</s>", "added_tokens_decoder": {"301": listed("</s>"), "300": listed("<|a|>")}}},
    "decoder hides the map": {
        CONFIG: {"eos_token": "<|a|>", "added_tokens_decoder": {"300": listed("<|a|>", special=True)}},
        MAP: {"eos_token": "<|b|>"},
        ADDED: {"<|b|>": 301},
    },
    "map over config": {CONFIG: {"eos_token": "<|a|>"}, MAP: {"eos_token": listed("<|im_end|>", lstrip=True)}},
    "added tokens": {CONFIG: {"eos_token": "<|im_end|>"}, ADDED: {"<|im_end|>": 301, "<|a|>": 300}},
    "further special tokens": {CONFIG: {"eos_token": "</s>", "additional_special_tokens": ["<|a|>", "<|b|>"]}},
    "in the map": {CONFIG: {"eos_token": "</s>"}, MAP: {"additional_special_tokens": ["<|a|>"]}},
    "by names": {CONFIG: {"eos_token": "</s>", "extra_special_tokens": {"image_token": "<|a|>"}, "x_token": "<|b|>"}},
    "a token of the vocabulary": {CONFIG: {"eos_token": "fox", "add_bos_token": True}},
    "split": {CONFIG: {"eos_token": "</s>", "split_special_tokens": True}},
}
SPELLED = "x <|im_end|> y </s> the fox<|a|> <|b|> <|endoftext|>"


@pytest.mark.parametrize("files", FOLDERS.values(), ids=FOLDERS)
def test_special_tokens_match_transformers(tmp_path, files):
    transformers = pytest.importorskip("transformers")
    folder = hf_folder(tmp_path / "hf", files)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    ours = build("HuggingFaceTokenizer", tokenizer_model=folder)
    assert ours.tokenize(SPELLED) == theirs(SPELLED).input_ids
    assert (ours.vocab_size, ours.bos, ours.eos) == (len(theirs), theirs.bos_token_id, theirs.eos_token_id)
    assert role_texts(Path(folder)).items() <= theirs.special_tokens_map.items()


NOT_TOKENS = [
    ({CONFIG: {"eos_token": 5}}, "eos_token in {file} is 5, but must be the text of a token"),
    ({CONFIG: {"eos_token": ["</s>"]}}, 'eos_token in {file} is ["</s>"], but must be'),
    ({CONFIG: {"eos_token": {"text": "</s>"}}}, 'eos_token in {file} is {{"text": "</s>"}}, but must be'),
    ({CONFIG: {"eos_token": ""}}, 'eos_token in {file} is "", but must be'),
    ({CONFIG: {"added_tokens_decoder": {"x": {}}}}, "added_tokens_decoder.x in {file} is {{}}, but must be"),
    ({CONFIG: {"added_tokens_decoder": []}}, "added_tokens_decoder in {file} is [], but must be an object"),
    ({MAP: {"eos_token": True}}, "eos_token in {file} is true, but must be"),
    ({ADDED: {"</s>": "7"}}, '</s> in {file} is "7", but must be an id'),
    ({CONFIG: {"extra_special_tokens": "</s>"}}, "extra_special_tokens in {file} is"),
]


@pytest.mark.parametrize(("files", "said"), NOT_TOKENS)
def test_a_token_that_cannot_be_understood_is_refused(tmp_path, files, said):
    folder = hf_folder(tmp_path / "hf", files)
    with pytest.raises(ValueError, match="--tokenizer-model") as caught:
        build("HuggingFaceTokenizer", tokenizer_model=folder)
    assert said.format(file=tmp_path / "hf" / next(iter(files))) in str(caught.value)


@pytest.mark.parametrize("before", [[], ["<|begin|>"], ["<|endoftext|>"]])
def test_a_text_to_continue_has_no_eos(tmp_path, before):
    tokenizer = build("HuggingFaceTokenizer", tokenizer_model=ending_texts(tmp_path, before))
    ids = tokenizer.tokenize("the fox")
    assert added_after(tokenizer) == [tokenizer.eod] == ids[-1:]
    assert tokenize_beginning(tokenizer, "the fox") == ids[:-1]
    assert added_after(build("ByteTokenizer")) == added_after(build("NullTokenizer", 9)) == []


def test_a_file_of_another_kind_is_named(tmp_path, gpt2_files, foreign_model):
    hf = hf_folder(tmp_path / "hf", {CONFIG: {"eos_token": "</s>"}})
    files = {
        "a.tiktoken": "IQ== 0\nIg== 1\n",
        "tekken.json": json.dumps({"config": {"pattern": "x"}, "vocab": [{"rank": 0, "token_bytes": "AA=="}]}),
        "pointer": "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n",
        "page.json": "<!DOCTYPE html><html></html>",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    others = [foreign_model, *gpt2_files.values(), f"{hf}/tokenizer.json", f"{hf}/{CONFIG}"]
    kinds = {
        "a.tiktoken": "is a tiktoken vocabulary",
        "tekken.json": "is a tekken vocabulary of Mistral",
        "pointer": "is a pointer of Git LFS",
        "page.json": "is a web page",
        "foreign.model": "is a SentencePiece model",
        "vocab.json": "is the vocab.json of a BPE",
        "merges.txt": "is the merges.txt of a BPE",
        "tokenizer.json": "is a tokenizer.json",
        CONFIG: "is a tokenizer configuration",
    }
    for file in (*(str(tmp_path / name) for name in files), *others):
        for kind, own in (("HuggingFaceTokenizer", "tokenizer.json"), ("SentencePieceTokenizer", "foreign.model")):
            if Path(file).name != own:
                with pytest.raises(ValueError, match=r"; (give|pass|use|get|download) ") as caught:
                    build(kind, tokenizer_model=file)
                assert f"--tokenizer-model {file}: {kinds[Path(file).name]}, not a" in str(caught.value)


def write_tokenizer(folder, vocab, **more):
    parts = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    (folder / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], **parts, **more, "model": model})
    )
    return folder


def test_an_id_beyond_all_vocabularies_is_refused(tmp_path):
    folder = write_tokenizer(tmp_path, {"a": 0, "b": 4_000_000_000})
    with pytest.raises(
        ValueError, match=r"--tokenizer-model \S+: 'b' has the id 4000000000, but the file has only 2 tokens"
    ):
        build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(folder)))


def test_a_failing_regular_expression_is_reported(tmp_path):
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    folder = write_tokenizer(tmp_path, {"a": 0, "b": 1}, pre_tokenizer=split)
    tokenizer = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(folder)))
    assert tokenizer.tokenize("aa") == [0, 0]
    with pytest.raises(
        ValueError, match=r"--tokenizer-model \S+: the tokenizer fails on a text of 41 characters, 'aaa"
    ):
        tokenizer.tokenize("a" * 40 + "!")


def test_an_error_about_unknown_text_names_the_tokenizer_file(tmp_path):
    folder = write_tokenizer(tmp_path, {"a": 0})
    model = {"type": "WordLevel", "vocab": {"yes": 0, "no": 1}, "unk_token": "<missing>"}
    write_parts(folder, model=model, pre_tokenizer={"type": "Whitespace"})
    tokenizer = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(folder)))
    assert added_after(tokenizer) == [] and tokenizer.tokenize("no yes") == [1, 0]
    with pytest.raises(
        ValueError, match=r"--tokenizer-model \S+: the tokenizer fails on a text of 5 characters, 'maybe"
    ):
        tokenizer.tokenize("maybe")


def write_parts(folder, **parts):
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | parts))
    return folder


def template(*ids, pattern="<A"):
    """Return a post-processor of tokenizer.json. Each "<" in `pattern` stands for the special token ids `ids`, and each
    "A" stands for the text."""
    parts = {"<": {"SpecialToken": {"id": "<s>", "type_id": 0}}, "A": {"Sequence": {"id": "A", "type_id": 0}}}
    around = [parts[letter] for letter in pattern]
    special = {"<s>": {"id": "<s>", "ids": list(ids), "tokens": ["<s>"] * len(ids)}}
    return {"type": "TemplateProcessing", "single": around, "pair": around, "special_tokens": special}


REPLACEMENTS = [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}] * 2
EMPTY = {"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 2000}


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (
            {"post_processor": template(4_294_967_295)},
            r"adds the ids \[4294967295\] to each text, which must be below 2",
        ),
        ({"post_processor": template(1, pattern="A<A")}, r"template must contain the text \(\$A\) once"),
        ({"post_processor": template(1, pattern="<")}, "encodes no text"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": REPLACEMENTS}},
            "normalizer can make a text 10,000 times as",
        ),
        (
            {"decoder": {"type": "Sequence", "decoders": [EMPTY]}},
            "decoder can make a text 2,001 times as long; at most",
        ),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/" * 8 + "A" * 64}}, "charsmap .* is damaged"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "A" * 16}}, "fails on a text of 1 characters"),
    ],
    ids=["ids", "text twice", "no text", "normalizer", "decoder", "table", "panic"],
)
def test_a_component_that_cannot_work_is_refused(tmp_path, parts, said):
    folder = write_parts(write_tokenizer(tmp_path, {"a": 0, "b": 1}), **parts)
    with pytest.raises(ValueError, match=rf"--tokenizer-model \S+tokenizer.json: .*{said}"):
        added_after(build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(folder))))


def test_short_replacements_are_kept(tmp_path):
    spaces = {"type": "Replace", "pattern": {"Regex": " +"}, "content": "b"}
    folder = write_parts(write_tokenizer(tmp_path, {"a": 0, "b": 1}), normalizer=spaces, post_processor=template(1))
    tokenizer = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(folder)))
    assert tokenizer.tokenize("a  a") == [1, 0, 1, 0] and tokenizer.added_around() == ([1], [])
