"""Tokenizers based on a SentencePiece model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.core.config.data import TokenizerConfig
from megatron.extensions.data.tokenizers.file_kinds import described

# Pieces that are appended to a model without <EOD>. Their order is fixed, so that the ids equal the ids in
# Megatron-LM's data.
APPENDED = ("<CLS>", "<SEP>", "<EOD>", "<MASK>")


class _OverModel:
    """Base class of tokenizers that wrap a SentencePiece model."""

    def __init__(self, config: TokenizerConfig, vocab_size: int | None = None) -> None:
        from sentencepiece import SentencePieceProcessor

        model = str(config.tokenizer_model)
        try:
            self._model = SentencePieceProcessor(model_file=model)
        except (OSError, RuntimeError, UnicodeDecodeError) as error:
            # UnicodeDecodeError is raised if the package's message contains invalid bytes of the file.
            wrong = described(Path(model), "a SentencePiece model", error)
            if wrong.startswith("not "):
                wrong += "; train one with tools/train_tokenizer.py, or use a different --tokenizer-type"
            raise ValueError(f"--tokenizer-model {model}: {wrong}") from None
        self.vocab_size: int = self._model.get_piece_size()
        self.bos, self.eos = (id if id >= 0 else None for id in (self._model.bos_id(), self._model.eos_id()))

    def find(self, token: str) -> int | None:
        id = int(self._model.piece_to_id(token))
        return id if self._model.id_to_piece(id) == token else None


class Llama2Tokenizer(_OverModel):
    """SentencePiece tokenizer with the conventions of Llama 2: every text begins with BOS, and every document ends with
    EOS."""

    def __init__(self, config: TokenizerConfig, vocab_size: int | None = None) -> None:
        super().__init__(config)
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


class SentencePieceTokenizer(_OverModel):
    """SentencePiece tokenizer whose documents end with <EOD>.

    If the model lacks the piece <EOD>, the pieces <CLS>, <SEP>, <EOD> and <MASK> are added after the last piece. Text
    is never encoded as a special token.
    """

    def __init__(self, config: TokenizerConfig, vocab_size: int | None = None) -> None:
        super().__init__(config)
        self._special: dict[int, str] = {}
        self.eod = self.find("<EOD>")
        if self.eod is None:
            absent = [name for name in APPENDED if self.find(name) is None]
            self._special = dict(enumerate(absent, self.vocab_size))
            self.eod = self.find("<EOD>")
        self.vocab_size += len(self._special)

    def tokenize(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text)
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Decode token ids to text in which special tokens appear by name."""
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
        return super().find(token) if added is None else added
