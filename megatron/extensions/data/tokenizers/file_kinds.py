"""Recognition of tokenizer files by their content, for error messages about files of the wrong kind."""

from __future__ import annotations

import json
import re
from pathlib import Path

BEGINNING = 1 << 16
HUGGING_FACE = (
    "use the tokenizer.json of the same model on the Hugging Face hub, with --tokenizer-type HuggingFaceTokenizer"
)


def kind_of_file(file: Path) -> tuple[str, str] | None:
    """Return a description of the file's content and a remedy for the user. Return None if the content is not
    recognized."""
    try:
        with open(file, "rb") as stream:
            start = stream.read(BEGINNING)
    except OSError:
        return None
    if start.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS", "get the file itself with git lfs pull"
    if re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n", start):
        return "a tiktoken vocabulary", HUGGING_FACE
    if start.startswith(b"#version"):
        return (
            "the merges.txt of a BPE",
            "pass it as --merge-file, with --vocab-file and --tokenizer-type GPT2BPETokenizer",
        )
    if re.match(rb"\n.[\s\S]?\n.*(<unk>|<s>|<pad>)", start, re.DOTALL) and not start.lstrip().startswith(b"{"):
        return "a SentencePiece model", "use --tokenizer-type SentencePieceTokenizer or Llama2Tokenizer"
    if re.match(rb"\s*<(!doctype html|html)", start, re.IGNORECASE):
        return "a web page", "download the file itself"
    return _kind_of_json(file) if start.lstrip().startswith(b"{") else None


def _kind_of_json(file: Path) -> tuple[str, str] | None:
    try:
        found: object = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    if isinstance(found.get("config"), dict) and isinstance(found.get("vocab"), list):
        return "a tekken vocabulary of Mistral", HUGGING_FACE
    if isinstance(found.get("model"), dict) and "added_tokens" in found:
        return "a tokenizer.json", "use --tokenizer-type HuggingFaceTokenizer"
    if found and all(isinstance(id, int) for id in found.values()):
        return (
            "the vocab.json of a BPE",
            "pass it as --vocab-file, with --merge-file and --tokenizer-type GPT2BPETokenizer",
        )
    if "tokenizer_class" in found or "eos_token" in found:
        return "a tokenizer configuration", "use the tokenizer.json in the same folder"
    if "architectures" in found or "model_type" in found:
        return "a model configuration", "use the tokenizer.json in the same folder"
    return None


def described(file: Path, wanted: str, error: object) -> str:
    """Describe why a file is not of the kind `wanted`. The description names the actual kind of the file, or contains
    the error of the package that reads the file."""
    kind = kind_of_file(file)
    if kind is None or kind[0] == wanted:
        return f"not {wanted} ({error})"
    return f"is {kind[0]}, not {wanted}; {kind[1]}"
