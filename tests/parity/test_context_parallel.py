"""Context-parallel layouts against one process, through the real training step in fp64: packed documents of odd
lengths, windows, dropout, masked losses, and everything that sequences are cut by besides."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.core.batch import Batch
from megatron.core.config.model import TransformerConfig
from megatron.core.datasets.gpt_dataset import Sample
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.mock import MockGPTDataset
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import initialize_model_parallel
from megatron.testing.snapshot import first_difference
from tests.extensions import installed
from tests.gpt_cases import FP64, STYLES, random_batch, token_losses
from tests.harness import Snapshot, run_world, train_in_world

TOLERANCE = 1e-9
COMMON = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 8 --seq-length 32 --make-vocab-size-divisible-by 8 "
    "--lr 1e-2 --weight-decay 0.1 --global-batch-size 4 --train-iters 2 --eval-iters 0 --num-workers 0 --fp64 --cpu"
)
MOCK = " --mock-data --vocab-size 100"
PACKED = (
    " --tokenizer-type ByteTokenizer --vocab-size 257 --split 1,0,0"
    " --reset-attention-mask --reset-position-ids --eod-mask-loss"
)
LLAMA = " --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
GQA = " --group-query-attention --num-query-groups 4"
LATENT = (
    " --multi-latent-attention --q-lora-rank 12 --kv-lora-rank 10 --qk-head-dim 6 --qk-pos-emb-head-dim 4"
    " --v-head-dim 5 --qk-layernorm --rotary-scaling-factor 4 --original-max-position-embeddings 8"
)
DELTA = (
    " --experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-conv-kernel-dim 3"
    " --linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 6 --linear-value-head-dim 5"
)
STYLE_FLAGS = {
    "learned": COMMON + MOCK,
    "gqa": COMMON + MOCK + LLAMA + GQA + " --qk-layernorm --attention-dropout 0 --hidden-dropout 0",
    "window": COMMON + MOCK + LLAMA + " --window-size 11 --untie-embeddings-and-output-weights",
    "packed": COMMON + PACKED + LLAMA + GQA + " --attention-dropout 0",
    "packed-window": COMMON + PACKED + " --window-size 6 --softmax-type learnable",
    "bloom": COMMON + MOCK + " --position-embedding-type alibi --embed-layernorm",
    "packed-alibi": COMMON + PACKED + GQA + " --position-embedding-type alibi --window-size 13 --attention-dropout 0",
    "latent": COMMON + MOCK + LLAMA + LATENT + " --window-size 11",
    "packed-latent": COMMON + PACKED + LLAMA + LATENT + " --attention-dropout 0",
    "delta-net": COMMON + MOCK + LLAMA + DELTA,
    "packed-delta-net": COMMON + PACKED + LLAMA + GQA + DELTA + " --attention-dropout 0",
    "mqa": COMMON + PACKED + LLAMA + " --group-query-attention --num-query-groups 1",
}
LAYOUTS = [
    ("learned", 2, "--cp 2"),
    ("learned", 8, "--cp 2 --tp 2 --pp 2 --sequence-parallel"),
    ("learned", 4, "--cp 2 --dp 2 --micro-batch-size 2 --cp-comm-type a2a"),
    ("gqa", 4, "--cp 4 --recompute-granularity full --recompute-method uniform"),
    ("gqa", 8, "--cp 2 --tp 2 --pp 2 --sequence-parallel --cp-comm-type a2a"),
    ("gqa", 4, "--cp 2 --tp 2 --cp-comm-type all_gather --micro-batch-size 2"),
    ("window", 4, "--cp 4 --micro-batch-size 2"),
    ("window", 4, "--cp 2 --pp 2 --cp-comm-type all_gather --recompute-granularity selective"),
    ("window", 4, "--cp 4 --cp-comm-type a2a"),
    ("packed", 4, "--cp 4 --micro-batch-size 2"),
    ("packed", 8, "--cp 2 --tp 2 --pp 2 --sequence-parallel --micro-batch-size 2"),
    ("packed", 4, "--cp 4 --cp-comm-type all_gather --recompute-granularity selective"),
    ("packed", 8, "--cp 2 --tp 2 --dp 2 --sequence-parallel --cp-comm-type a2a"),
    ("packed-window", 4, "--cp 2 --tp 2 --sequence-parallel"),
    ("packed-window", 4, "--cp 4 --cp-comm-type a2a --micro-batch-size 2"),
    ("bloom", 4, "--cp 4 --recompute-granularity selective"),
    ("bloom", 8, "--cp 2 --tp 2 --pp 2 --sequence-parallel --cp-comm-type a2a --micro-batch-size 2"),
    ("bloom", 4, "--cp 2 --tp 2 --cp-comm-type all_gather --recompute-granularity full --recompute-method uniform"),
    ("packed-alibi", 4, "--cp 2 --tp 2 --sequence-parallel --micro-batch-size 2"),
    ("packed-alibi", 4, "--cp 4 --cp-comm-type all_gather"),
    ("packed-alibi", 4, "--cp 4 --cp-comm-type a2a"),
    ("latent", 4, "--cp 2 --tp 2 --cp-comm-type a2a"),
    ("latent", 4, "--cp 4 --cp-comm-type all_gather"),
    ("packed-latent", 8, "--cp 2 --tp 2 --pp 2 --sequence-parallel --micro-batch-size 2"),
    ("delta-net", 4, "--cp 4 --cp-comm-type a2a --recompute-granularity full --recompute-method uniform"),
    ("delta-net", 8, "--cp 2 --tp 2 --pp 2 --sequence-parallel --micro-batch-size 2"),
    ("packed-delta-net", 4, "--cp 4 --micro-batch-size 2 --recompute-granularity selective"),
    ("packed-delta-net", 4, "--cp 2 --tp 2 --cp-comm-type all_gather"),
    ("mqa", 4, "--cp 4 --no-use-distributed-optimizer"),
    ("mqa", 4, "--cp 2 --pp 2 --cp-comm-type all_gather --micro-batch-size 4"),
]


@pytest.fixture(scope="module")
def odd_documents(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents of 1 to 23 bytes, each with its end: in samples of 32 they begin and end anywhere."""
    prefix = str(tmp_path_factory.mktemp("data") / "odd")
    random = np.random.default_rng(3)
    with IndexedDatasetBuilder(prefix, np.dtype(np.uint16)) as builder:
        for length in random.integers(1, 24, size=60):
            builder.add_document([*random.integers(256, size=length), 256])
    return prefix


@pytest.fixture(scope="module")
def one_process(odd_documents: str) -> Any:
    return lru_cache(lambda style: train_in_world(1, argv(style, odd_documents)))


def argv(style: str, prefix: str, layout: str = "") -> list[str]:
    flags = STYLE_FLAGS[style] + (f" --data-path {prefix}" if "--split" in STYLE_FLAGS[style] else "")
    return [*flags.split(), *layout.split()]


def assert_same(expected: Snapshot, actual: Snapshot) -> None:
    assert not actual.replica_errors
    assert first_difference(expected, actual, TOLERANCE) is None


OF_EXTENSIONS = {"latent": "latent_attention", "delta-net": "linear_attention"}
NAMED = {
    f"{style} {size} {flags.replace('--', '')}": (style, size, flags)
    for style, size, flags in LAYOUTS
    if all(installed(extension) for part, extension in OF_EXTENSIONS.items() if part in style)
}


@pytest.mark.grid("name", list(NAMED)[::2], list(NAMED))
def test_layout_computes_what_one_process_does(name: str, one_process: Any, odd_documents: str) -> None:
    style, world_size, layout = NAMED[name]
    assert_same(one_process(style), train_in_world(world_size, argv(style, odd_documents, layout)))


@pytest.mark.parametrize(("positions", "acts"), [("learned_absolute", True), ("rope", False)])
def test_position_ids_restart_for_learned_positions_only(odd_documents: str, positions: str, acts: bool) -> None:
    """Attention reaches across documents here, so that rotary positions that restart would change it."""
    flags = (
        f"{COMMON} --data-path {odd_documents} --tokenizer-type ByteTokenizer --vocab-size 257 --split 1,0,0".split()
    )
    flags += ["--position-embedding-type", positions]
    one, other = (train_in_world(1, [*flags, *more], steps=1) for more in ([], ["--reset-position-ids"]))
    assert (first_difference(one, other, TOLERANCE) is not None) == acts


def masked_sample(self: MockGPTDataset, index: int) -> Sample:
    """Random masks of all densities; samples 0 and 4, and of sample 1 the chunks of one rank, count for nothing."""
    sample = self.format.sample(self.text(index))
    random = np.random.default_rng(index)
    mask = (random.random(self.format.seq_length) < random.random()).astype(np.float32)
    if index % 4 == 0:
        mask[:] = 0
    if index == 1:
        mask[:8] = mask[24:] = 0
    return {**sample, "loss_mask": mask}


def test_random_loss_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """However the batch is cut, and though all tokens of some ranks are masked: one gradient."""
    monkeypatch.setattr(MockGPTDataset, "__getitem__", masked_sample)
    flags = [*STYLE_FLAGS["learned"].split(), "--global-batch-size", "8"]
    expected = train_in_world(1, flags, steps=1)
    for world_size, layout in (
        (1, "--micro-batch-size 4"),
        (2, "--cp 2 --micro-batch-size 2"),
        (4, "--dp 4"),
        (4, "--cp 2 --dp 2 --micro-batch-size 4"),
        (8, "--cp 2 --dp 4 --micro-batch-size 2"),
        (4, "--cp 2 --pp 2"),
        (8, "--cp 2 --dp 2 --pp 2"),
        (4, "--dp 2 --pp 2 --micro-batch-size 2"),
    ):
        assert_same(expected, train_in_world(world_size, [*flags, *layout.split()], steps=1))


def losses_of_rank(rank: int, world: int, config: TransformerConfig, kind: str, batch: Batch) -> tuple[Any, Any]:
    state = initialize_model_parallel(context_parallel_size=world)
    parallel = replace(FP64, context_parallel_size=world, cp_comm_type=kind)
    local = batch.local_to(state.cp)
    assert local.places is not None
    with torch.no_grad():
        losses = token_losses(GPTModel(config, parallel, state).eval(), local)
    return local.places.numpy(), losses.numpy()


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


@pytest.mark.parametrize("kind", ["p2p", "all_gather", "a2a"])
@pytest.mark.parametrize("style", ["gpt", "mistral", "bloom"])
def test_packed_documents_have_the_losses_they_have_alone(style: str, kind: str) -> None:
    config = STYLES[style]
    batch, starts = odd_batch(config)
    losses = torch.full(batch.tokens.shape, torch.nan, dtype=torch.float64)
    for places, local in run_world(4, losses_of_rank, config, kind, batch):
        losses[:, places] = torch.from_numpy(local)
    model = GPTModel(config, FP64).eval()
    for sample, cuts in enumerate(starts):
        for start, stop in pairwise([*cuts, config.seq_length]):
            expected = alone(model, batch, sample, start, stop)
            torch.testing.assert_close(losses[sample, start:stop], expected, rtol=1e-12, atol=1e-12)


def test_the_odd_documents_cross_the_borders_of_chunks(odd_documents: str) -> None:
    """The data of this file are what its first line says."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    lengths = IndexedDataset(odd_documents).lengths
    assert (lengths % 2).any() and (lengths > 32 // 4).any() and (lengths < 32 // 8).any()
