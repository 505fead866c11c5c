"""Test that each document in a packed sample has the same logits as if it were the only document of the sample, and
that its positions start at 0. The parity matrix covers parallel layouts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.testing.snapshot import first_difference
from tests.corpus import write_documents
from tests.gpt_cases import FP64, STYLES, check_documents_apart, packed_documents, random_batch
from tests.harness import train_in_world

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 8 --seq-length 32 --make-vocab-size-divisible-by 8 "
    "--lr 1e-2 --weight-decay 0.1 --global-batch-size 4 --train-iters 2 --eval-iters 0 --num-workers 0 --fp64 --cpu "
    "--tokenizer-type ByteTokenizer --vocab-size 257 --split 1,0,0"
)


@pytest.mark.parametrize(("positions", "acts"), [("learned_absolute", True), ("rope", False)])
def test_position_ids_restart_for_learned_positions_only(tmp_path: Path, positions: str, acts: bool) -> None:
    """In this test, tokens attend to other documents, so rotary position embeddings would give different results if
    their positions restarted."""
    random = np.random.default_rng(3)
    documents = ([*random.integers(256, size=length), 256] for length in random.integers(1, 24, size=60))
    flags = f"{FLAGS} --data-path {write_documents(tmp_path / 'odd', documents)} --position-embedding-type {positions}"
    one, other = (train_in_world(1, (flags + more).split(), steps=1) for more in ("", " --reset-position-ids"))
    assert (first_difference(one, other, 1e-9) is not None) == acts


@pytest.mark.parametrize("style", ["gpt", "mistral", "bloom"])
def test_packed_documents_have_the_same_logits_as_alone(style: str) -> None:
    config = STYLES[style]
    check_documents_apart(GPTModel(config, FP64).eval(), random_batch(config, **packed_documents(config)))
