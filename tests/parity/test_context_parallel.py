"""Packed documents: each has the loss that it has alone, and positions that restart. The matrix has the layouts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.core.batch import Batch
from megatron.core.config.model import TransformerConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.testing.snapshot import first_difference
from tests.corpus import write_documents
from tests.gpt_cases import FP64, STYLES, random_batch, token_losses
from tests.harness import train_in_world

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 8 --seq-length 32 --make-vocab-size-divisible-by 8 "
    "--lr 1e-2 --weight-decay 0.1 --global-batch-size 4 --train-iters 2 --eval-iters 0 --num-workers 0 --fp64 --cpu "
    "--tokenizer-type ByteTokenizer --vocab-size 257 --split 1,0,0"
)


@pytest.mark.parametrize(("positions", "acts"), [("learned_absolute", True), ("rope", False)])
def test_position_ids_restart_for_learned_positions_only(tmp_path: Path, positions: str, acts: bool) -> None:
    """Attention reaches across documents here, so that rotary positions that restart would change it."""
    random = np.random.default_rng(3)
    documents = ([*random.integers(256, size=length), 256] for length in random.integers(1, 24, size=60))
    flags = f"{FLAGS} --data-path {write_documents(tmp_path / 'odd', documents)} --position-embedding-type {positions}"
    one, other = (train_in_world(1, (flags + more).split(), steps=1) for more in ("", " --reset-position-ids"))
    assert (first_difference(one, other, 1e-9) is not None) == acts


def odd_batch(config: TransformerConfig) -> tuple[Batch, list[list[int]]]:
    """Three samples, and where the documents in each begin: on, before and behind the borders of chunks."""
    starts = [[0, 3, 8, 15], [0, 1, 2, 13], [0, 7]]
    document_ids = torch.zeros(3, config.seq_length, dtype=torch.int64)
    for sample, cuts in enumerate(starts):
        document_ids[sample, cuts[1:]] = 1
    document_ids = document_ids.cumsum(1)
    position_ids = torch.zeros_like(document_ids)
    for sample, cuts in enumerate(starts):
        for start, stop in pairwise([*cuts, config.seq_length]):
            position_ids[sample, start:stop] = torch.arange(stop - start)
    return random_batch(config, document_ids=document_ids, position_ids=position_ids), starts


def alone(model: GPTModel, batch: Batch, sample: int, start: int, stop: int) -> Tensor:
    tokens, labels = (x[sample : sample + 1, start:stop] for x in (batch.tokens, batch.labels))
    nothing = torch.zeros(1, dtype=torch.int64)
    with torch.no_grad():
        return token_losses(model, Batch(tokens, labels, torch.ones(tokens.shape), nothing))[0]


@pytest.mark.parametrize("style", ["gpt", "mistral", "bloom"])
def test_packed_documents_have_the_losses_they_have_alone(style: str) -> None:
    config = STYLES[style]
    batch, starts = odd_batch(config)
    model = GPTModel(config, FP64).eval()
    with torch.no_grad():
        losses = token_losses(model, batch)
    for sample, cuts in enumerate(starts):
        for start, stop in pairwise([*cuts, config.seq_length]):
            expected = alone(model, batch, sample, start, stop)
            torch.testing.assert_close(losses[sample, start:stop], expected, rtol=1e-12, atol=1e-12)
