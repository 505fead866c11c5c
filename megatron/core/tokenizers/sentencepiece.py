"""Tokenizers of a SentencePiece model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Appended in this order to a model without <EOD>, so that ids equal those of Megatron-LM's data.
APPENDED = ("<CLS>", "<SEP>", "<EOD>", "<MASK>")


def _load(model: str) -> Any:
    from sentencepiece import SentencePieceProcessor

    try:
        return SentencePieceProcessor(model_file=model)
    except (OSError, RuntimeError, UnicodeDecodeError) as error:  # the package quotes what it cannot read
        raise ValueError(
            f"--tokenizer-model {model}: not a SentencePiece model ({error}); "
            "train one with tools/train_tokenizer.py, or use another --tokenizer-type"
        ) from None


class Llama2Tokenizer:
    """A SentencePiece model in Llama 2's way: text starts with BOS, and EOS ends a document."""

    def __init__(self, model: str) -> None:
        self._model = _load(model)
        self.vocab_size: int = self._model.get_piece_size()
        self.bos = _present(self._model.bos_id())
        self.eos = _present(self._model.eos_id())
        self.eod = self.eos

    def tokenize(self, text: str, bos: bool = True, eos: bool = False) -> list[int]:
        ids: list[int] = self._model.encode(text)
        if bos and self.bos is not None:
            ids = [self.bos, *ids]
        if eos and self.eos is not None:
            ids.append(self.eos)
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._model.decode([int(id) for id in ids]))

    def find(self, token: str) -> int | None:
        return _find(self._model, token)


class SentencePieceTokenizer:
    """A SentencePiece model whose documents end with <EOD>.

    If the model lacks this piece, <CLS>, <SEP>, <EOD> and <MASK> are added after its last piece. Text is never encoded
    to a special token.
    """

    def __init__(self, model: str) -> None:
        self._model = _load(model)
        pieces: int = self._model.get_piece_size()
        self._special: dict[int, str] = {}
        self.eod = _find(self._model, "<EOD>")
        if self.eod is None:
            absent = [name for name in APPENDED if _find(self._model, name) is None]
            self._special = {pieces + place: name for place, name in enumerate(absent)}
            self.eod = next(id for id, name in self._special.items() if name == "<EOD>")
        self.vocab_size = pieces + len(self._special)
        self.bos = _present(self._model.bos_id())
        self.eos = _present(self._model.eos_id())

    def tokenize(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text)
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of token ids; special tokens appear by name."""
        parts: list[str] = []
        run: list[int] = []
        for id in map(int, ids):
            if id in self._special or id == self.eod:
                parts += [self._model.decode(run), self._special.get(id, "<EOD>")]
                run = []
            else:
                run.append(id)
        return "".join([*parts, self._model.decode(run)])

    def find(self, token: str) -> int | None:
        added = next((id for id, name in self._special.items() if name == token), None)
        return _find(self._model, token) if added is None else added


def _find(model: Any, piece: str) -> int | None:
    id = int(model.piece_to_id(piece))
    return id if model.id_to_piece(id) == piece else None


def _present(id: int) -> int | None:
    return id if id >= 0 else None
