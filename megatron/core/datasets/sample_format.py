"""Conversion of a sample's token ids to model inputs. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Sample = dict[str, NDArray | None]


@dataclass(frozen=True)
class SampleFormat:
    """Converter from the token ids of a sample to model inputs. The boolean options require `eod`, the id of the
    end-of-document token."""

    seq_length: int
    eod: int | None = None
    vocab_size: int | None = None
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    pad: int | None = None
    """Padding token, which is excluded from the loss."""

    def __post_init__(self) -> None:
        for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
            if getattr(self, name) and self.eod is None:
                raise ValueError(
                    f"--{name.replace('_', '-')}: needs an end-of-document token, but the tokenizer has none; "
                    "use a tokenizer that has one, or remove the flag"
                )

    def sample(self, text: NDArray[np.int64]) -> Sample:
        """Convert the token ids `text` [s+1] into a dictionary of arrays: tokens, labels, loss_mask (float32),
        position_ids and document_ids, each of shape [s].

        An EOD token belongs to the document that it ends. position_ids is None if it would be 0..s-1; document_ids is
        None if attention crosses documents. The method raises ValueError if `text` does not have seq_length + 1 tokens.
        """
        if text.shape != (self.seq_length + 1,):
            raise ValueError(
                f"a sample of the data has shape {text.shape}, but must have --seq-length + 1 = {self.seq_length + 1} "
                "token ids"
            )
        tokens, labels = text[:-1], text[1:]
        loss_mask = np.ones(len(tokens), np.float32)
        if self.pad is not None:
            loss_mask[labels == self.pad] = 0.0
        position_ids = document_ids = None
        if self.eod_mask_loss or self.reset_position_ids or self.reset_attention_mask:
            ends = tokens == self.eod
            if self.eod_mask_loss:
                loss_mask[ends] = 0.0
            starts = np.zeros(len(tokens), np.int64)
            starts[1:] = ends[:-1]
            if self.reset_position_ids:
                positions = np.arange(len(tokens))
                position_ids = positions - np.maximum.accumulate(positions * starts)
            if self.reset_attention_mask:
                document_ids = np.cumsum(starts)
        return {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": loss_mask,
            "position_ids": position_ids,
            "document_ids": document_ids,
        }

    def check_ids(self, ids: NDArray, where: str) -> None:
        """Raise ValueError if a token id is outside the vocabulary."""
        if self.vocab_size is None or len(ids) == 0:
            return
        # a single comparison suffices: as unsigned numbers, negative ids exceed any vocabulary size
        if ids.view(f"u{ids.dtype.itemsize}").max() >= self.vocab_size:
            worst = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise ValueError(
                f"{where} has token id {worst}, outside the vocabulary of {self.vocab_size} tokens (--vocab-size or "
                "the tokenizer's); train with the tokenizer that created the data"
            )
