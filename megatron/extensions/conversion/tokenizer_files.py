"""Files of a tokenizer in the folder of a model, as Hugging Face names them. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from megatron.core.config.data import TokenizerConfig
from megatron.core.tokenizers.huggingface import tokenizer_file

GENERATION_CONFIG = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def tokenizer_files(folder: Path) -> Iterator[Path]:
    """The files of a folder that belong to its tokenizer."""
    return (folder / name for name in TOKENIZER_FILES if (folder / name).is_file())


def tokenizer_config(folder: Path, names: Collection[str] | None = None) -> TokenizerConfig:
    """Flags for the tokenizer of a Hugging Face folder that has, or will have, files of these names.

    They name no tokenizer if the files are those of none.
    """
    names = [file.name for file in tokenizer_files(folder)] if names is None else names
    if "tokenizer.json" in names:
        return TokenizerConfig("HuggingFaceTokenizer", str(folder))
    if "tokenizer.model" in names:
        return TokenizerConfig("Llama2Tokenizer", str(folder / "tokenizer.model"))
    if {"vocab.json", "merges.txt"} <= set(names):
        return TokenizerConfig(
            "GPT2BPETokenizer", vocab_file=str(folder / "vocab.json"), merge_file=str(folder / "merges.txt")
        )
    return TokenizerConfig()


def side_files_of(tokenizer: TokenizerConfig) -> dict[str, Path]:
    """The files of a run's tokenizer, by their names in a Hugging Face folder, that are where the run had them."""
    found: dict[str, Path] = {}
    if tokenizer.tokenizer_type == "HuggingFaceTokenizer":
        try:
            file = tokenizer_file(str(tokenizer.tokenizer_model))
        except ValueError:
            return {}
        found = {each.name: each for each in tokenizer_files(file.parent)}
        found |= {"tokenizer.json": file, GENERATION_CONFIG: file.parent / GENERATION_CONFIG}
    elif tokenizer.tokenizer_type in ("SentencePieceTokenizer", "Llama2Tokenizer"):
        found = {"tokenizer.model": Path(str(tokenizer.tokenizer_model))}
    elif tokenizer.tokenizer_type == "GPT2BPETokenizer":
        found = {"vocab.json": Path(str(tokenizer.vocab_file)), "merges.txt": Path(str(tokenizer.merge_file))}
    return {name: path for name, path in found.items() if path.is_file()}
