"""Tokenizers that use the `tokenizers` package and are read from a tokenizer.json, or from GPT-2's vocabulary and
merges."""

from __future__ import annotations

import base64
import itertools
import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.core.config.data import TokenizerConfig
from megatron.core.tokenizers import with_local_files
from megatron.extensions.data.tokenizers.file_kinds import described
from megatron.extensions.data.tokenizers.special_tokens import FILES, read_special_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

logger = logging.getLogger(__name__)

# Candidates for the end-of-document token if no configuration file names it.
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<EOD>", "<|im_end|>")
GPT2_EOD = "<|endoftext|>"
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
"""Name on the Hugging Face hub, such as gpt2 or meta-llama/Llama-3.1-8B."""


MOST_IDS = 1 << 24
"""Upper bound for token ids. The bound is about sixty times the size of the largest vocabularies in use."""


MOST_GROWTH = 1000
"""Maximum factor by which a normalizer or decoder may lengthen a string. The factors of common normalizers are much
smaller."""

CHARSMAP = re.compile(rb'"precompiled_charsmap"\s*:\s*"([^"]*)"')


class _OverTokenizers:
    """Base class of tokenizers that wrap a `tokenizers.Tokenizer`."""

    _tokenizer: FastTokenizer

    _flags: str
    """Flags that specify the tokenizer's files, followed by their values. Error messages contain this text."""

    vocab_size: int

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text. Raises ValueError if the tokenizer cannot encode the text. Possible causes
        are a regular expression that fails, or an unknown character for which the vocabulary has no token."""
        return self._encode(text)

    def _encode(self, text: str, special: bool = True) -> list[int]:
        """Return the token ids of a text. If `special` is True, the result includes the special tokens that the
        tokenizer adds around each text, such as BOS."""
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=special).ids)
        except BaseException as error:
            # The package raises an instance of Exception itself, not of a subclass. Rust panics do not derive from
            # Exception.
            if type(error) is not Exception and type(error).__name__ != "PanicException":
                raise
            raise ValueError(
                f"{self._flags}: the tokenizer fails on a text of {len(text)} characters, {text[:40]!a}... ({error}); "
                "use another tokenizer, or leave this text out"
            ) from None

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([int(id) for id in ids], skip_special_tokens=False))

    def find(self, token: str) -> int | None:
        id = self._tokenizer.token_to_id(token)
        return None if id is None else int(id)

    def to_json(self) -> str:
        """Serialize the tokenizer to the format of tokenizer.json."""
        return str(self._tokenizer.to_str())

    def added_around(self) -> tuple[list[int], list[int]]:
        """Return the ids that the tokenizer adds before and after each text, such as BOS. Raises ValueError if the
        tokenizer encodes no text, drops the text, or adds ids outside its vocabulary."""
        text, bare = self._encodable_text()
        whole = self._encode(text)
        start = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), None)
        if start is None:
            raise ValueError(
                f"{self._flags}: the post_processor drops or changes the tokens of a text; its template must "
                "contain the text ($A) once"
            )
        before, behind = whole[:start], whole[start + len(bare) :]
        if max((*before, *behind), default=0) >= self.vocab_size:
            raise ValueError(
                f"{self._flags}: the post_processor adds the ids {(before + behind)[:8]} to each text, which must be "
                f"below {self.vocab_size}, the size of the vocabulary; correct them, or use another file"
            )
        return before, behind

    def _encodable_text(self) -> tuple[str, list[int]]:
        """Return a string that the tokenizer encodes to at least one token, and the ids of this string. Raises
        ValueError if there is no such string."""
        problem = ValueError(f"{self._flags}: the tokenizer encodes no text; use another file")
        for text in itertools.chain("a0 ", itertools.islice(self._tokenizer.get_vocab(), 1000)):
            try:
                if ids := self._encode(text, special=False):
                    return text, ids
            except ValueError as error:
                problem = error
        raise problem

    def special_names(self) -> list[str]:
        """Return the strings of all added tokens. Documents may contain these strings."""
        return [str(token.content) for token in self._tokenizer.get_added_tokens_decoder().values()]


def _size_of(vocab: Mapping[str, int], flags: str) -> int:
    """Return the number of ids of the vocabulary `vocab`. Raises ValueError if an id exceeds `MOST_IDS`. Such a file
    must be damaged or malicious, and the package would allocate a huge table of all ids when it saves the tokenizer."""
    token = max(vocab, key=vocab.__getitem__)
    if vocab[token] >= MOST_IDS:
        raise ValueError(
            f"{flags}: {token[:40]!a} has the id {vocab[token]}, but the file has only {len(vocab)} tokens; ids must "
            f"be below {MOST_IDS:,}: correct the id, or use another file"
        )
    return vocab[token] + 1


def tokenizer_file(name: str) -> Path:
    """Return the tokenizer.json that `name` refers to. `name` is the file, its folder, or the name of a model in the
    local Hugging Face cache (HF_HUB_CACHE, HF_HOME). In the cache, the revision `main` of the model is used. If `name`
    is an existing path, the cache is not searched. Nothing is downloaded. Raises ValueError if there is no such
    file."""
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        return file
    if path.exists() or path.suffix == ".json" or not HUB_NAME.fullmatch(name):
        raise ValueError(
            f"--tokenizer-model {name}: there is no {file}; use a local tokenizer.json, its folder, or a name in the "
            "Hugging Face cache (nothing is downloaded)"
        )
    try:
        from huggingface_hub import constants, try_to_load_from_cache
    except ImportError:
        raise ValueError("--tokenizer-type HuggingFaceTokenizer: needs a package; pip install tokenizers") from None
    cached = try_to_load_from_cache(name, "tokenizer.json")
    if not isinstance(cached, str):
        raise ValueError(
            f"--tokenizer-model {name}: there is no such file or folder, and no tokenizer.json of this name in the "
            f"Hugging Face cache {constants.HF_HUB_CACHE}; where there is a network, run "
            f"hf download {name} --include '*token*.json'"
        )
    return Path(cached)


def tokenizer_inputs(config: TokenizerConfig) -> list[Path]:
    """Return the existing files that a tokenizer reads. `HuggingFaceTokenizer` reads the tokenizer.json and the
    configuration files in its folder. Other tokenizers read the files that the flags specify."""
    config = with_local_files(config)
    if config.tokenizer_type == "HuggingFaceTokenizer":
        file = tokenizer_file(str(config.tokenizer_model))
        return [file, *(path for name in FILES if (path := file.parent / name).is_file())]
    named = [Path(path) for path in (config.tokenizer_model, config.vocab_file, config.merge_file) if path]
    inside = (sorted(path.iterdir()) if path.is_dir() else [path] for path in named)
    return [path for paths in inside for path in paths if path.is_file()]


class HuggingFaceTokenizer(_OverTokenizers):
    """Tokenizer read from the tokenizer.json that `tokenizer_file` finds.

    The special and added tokens are read by `read_special_tokens`. EOD is the EOS token. Texts are encoded as the
    tokenizer.json specifies, except that truncation, padding and random segmentation are disabled. Special tokens that
    occur in a text are encoded as special tokens.
    """

    def __init__(self, config: TokenizerConfig, vocab_size: int | None = None) -> None:
        file = tokenizer_file(str(config.tokenizer_model))
        self._tokenizer = _from_file(file)
        _encode_whole_texts(self._tokenizer, file)
        special = read_special_tokens(file.parent, self._tokenizer)
        special.add_to(self._tokenizer)
        self._vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self._flags = f"--tokenizer-model {file}"
        self.vocab_size = _size_of(self._vocab, self._flags)
        self.bos = self._vocab.get(special.role("bos_token") or "")
        self.eos = self._vocab.get(special.role("eos_token") or "")
        if self.eos is None:
            self.eos = next((self._vocab[name] for name in END_NAMES if name in self._vocab), None)
        self.eod = self.eos


class GPT2BPETokenizer(_OverTokenizers):
    """GPT-2's byte-level BPE, read from vocab.json and merges.txt. Text is never encoded as <|endoftext|>."""

    bos = None

    def __init__(self, config: TokenizerConfig, vocab_size: int | None = None) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        vocab_file, merge_file = str(config.vocab_file), str(config.merge_file)
        try:
            model = models.BPE.from_file(vocab_file, merge_file)
        except Exception as error:  # tokenizers raises Exception itself, not a subclass
            raise ValueError(
                f"--vocab-file {vocab_file}, --merge-file {merge_file}: must be GPT-2's vocab.json and merges.txt "
                f"({error})"
            ) from None
        self._tokenizer = Tokenizer(model)
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = decoders.ByteLevel()
        vocab = self._tokenizer.get_vocab()
        if GPT2_EOD not in vocab:
            raise ValueError(f"--vocab-file {vocab_file} has no {GPT2_EOD}, the end-of-document token; add it")
        self._flags = f"--vocab-file {vocab_file}, --merge-file {merge_file}"
        self.vocab_size = _size_of(vocab, self._flags)
        self.eod = self.eos = vocab[GPT2_EOD]


def _from_file(file: Path) -> FastTokenizer:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError("--tokenizer-type HuggingFaceTokenizer: needs a package; pip install tokenizers") from None
    _check_charsmaps(file)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises Exception itself, not a subclass
        raise ValueError(f"--tokenizer-model {file}: {described(file, 'a tokenizer.json', error)}") from None
    for name in ("normalizer", "decoder"):
        part = getattr(tokenizer, name)
        growth = 1 if part is None else _growth(json.loads(part.__getstate__()))
        if growth > MOST_GROWTH:
            raise ValueError(
                f"--tokenizer-model {file}: replacements of its {name} can make a text {growth:,.0f} times as long; at "
                f"most {MOST_GROWTH} times is supported: shorten them, or use another file"
            )
    return tokenizer


def _check_charsmaps(file: Path) -> None:
    """Raise ValueError if the length field in the table of a Precompiled normalizer exceeds the length of the data.
    Without this check, the package would try to allocate memory for such a damaged table, and abort the process."""
    for found in CHARSMAP.finditer(file.read_bytes()):
        try:
            table = base64.b64decode(found[1])
        except ValueError:
            # Invalid base64 is ignored here, because the tokenizers package reports it.
            continue
        if len(table) < 4 or int.from_bytes(table[:4], "little") > len(table) - 4:
            raise ValueError(
                f"--tokenizer-model {file}: the precompiled_charsmap of its normalizer is damaged: the table must fit "
                f"into its {len(table)} bytes; get the file again"
            )


def _growth(part: object) -> float:
    """Return the maximum factor by which a normalizer or decoder in tokenizer.json can lengthen a text when it replaces
    or prepends strings."""
    if not isinstance(part, dict):
        raise TypeError(f"{str(part)[:80]!r} is not a normalizer or decoder")
    growth = prod([_growth(each) for each in (*part.get("normalizers", ()), *part.get("decoders", ()))])
    kind = part.get("type")
    if kind == "Prepend":
        return growth * (1 + len(part["prepend"]))
    if kind == "Replace":
        # A regular expression has length 0 here, because it may match the empty string before every character.
        length = len(part["pattern"].get("String", ""))
        return growth * max(1.0, len(part["content"]) / length if length else 1 + len(part["content"]))
    return growth


def _encode_whole_texts(tokenizer: FastTokenizer, file: Path) -> None:
    """Disable the truncation, padding and random segmentation that a tokenizer.json specifies."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # These settings of BPE and Unigram models randomize the segmentation of texts.
    for setting in ("dropout", "alpha"):
        if getattr(tokenizer.model, setting, None):
            _say_deterministic(file, setting, getattr(tokenizer.model, setting))
            setattr(tokenizer.model, setting, None)


@cache
def _say_deterministic(file: Path, setting: str, value: float) -> None:
    logger.warning(
        "%s: %s %g of its model, which segments text at random, is disabled, so that the same text always gives the "
        "same tokens",
        file,
        setting,
        value,
    )
