"""Tests of the KV cache. A model that reads a text in several parts computes the same logits as a model that reads the
text as a whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.batch import Batch
from megatron.core.config.model import TransformerConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.extensions.use.inference.generation.kv_cache import KeyValueCache
from tests.extensions import needs
from tests.gpt_cases import FP64, STYLES, random_batch, with_dropout


@pytest.mark.parametrize("style", STYLES)
def test_cached_decoding_has_the_logits_of_the_whole_text(style: str) -> None:
    config = with_dropout(STYLES[style])
    assert_cached_as_whole(config, random_batch(config))


@pytest.mark.parametrize(
    "mixer",
    ["llama", needs("latent_attention", "latent"), needs("linear_attention", "delta-net"), needs("mamba", "mamba")],
)
@pytest.mark.parametrize("softmax", ["learnable", "off-by-one"])
@pytest.mark.parametrize(
    "layers", [{"window_size": 5, "window_attn_skip_freq": "2"}, {"attention_chunk_size": 6, "no_rope_freq": "2"}]
)
def test_cached_decoding_supports_all_kinds_of_softmax(mixer: str, softmax: str, layers: dict[str, Any]) -> None:
    config = replace(STYLES[mixer], softmax_type=softmax, **layers)
    assert_cached_as_whole(config, random_batch(config))


def assert_cached_as_whole(config: TransformerConfig, batch: Batch) -> None:
    """Feed three texts to a model in parts of different lengths, with a cache of the earlier parts. Assert that the
    logits equal the logits of a model that reads each text as a whole. Then drop one of the texts from the cache and
    repeat the check for the others."""
    model = GPTModel(config, FP64).eval()
    expected = model.logits(None, batch)
    assert expected.shape == (3, config.seq_length, config.vocab_size)
    cache, rows, kept = KeyValueCache(), [0, 1, 2], list[Any]()
    for counts in ((6, 2, 7), (1, 1, 1), (1, 5, 2), (2, 1, 1)):
        assert_next_logits(model, cache, rows, counts, batch.tokens, expected)
        kept.append({layer: [state.shape for state in states] for layer, states in cache._states.items()})
    assert kept == kept[:1] * 4, "the size of a state does not depend on the number of tokens"
    assert cache._layers.keys() == {layer for layer, kind in enumerate(config.layers) if kind.attends}
    cache.drop(0)
    assert_next_logits(model, cache, [2, 1], (1, 3), batch.tokens, expected)
    cache.drop(1)
    assert_next_logits(model, cache, [2], (3,), batch.tokens, expected)


def assert_next_logits(
    model: GPTModel, cache: KeyValueCache, rows: list[int], counts: tuple[int, ...], tokens: Tensor, expected: Tensor
) -> None:
    """Extend the texts in the cache by the next tokens, and compare the logits of these tokens with `expected`. `rows`
    contains, for each row of the cache, the index of its text in `tokens` [b, s]."""
    starts = cache.lengths[: len(rows)] or [0] * len(rows)
    cached = cache.extend(counts, tokens.device)
    new = torch.full((len(rows), max(counts)), 5)
    for row, (text, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
        new[row, :count] = tokens[text, start : start + count]
    found = model.logits(None, Batch.of_tokens(new), cached)
    for row, (text, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
        wanted = expected[text, start : start + count]
        torch.testing.assert_close(found[row, :count], wanted, rtol=1e-12, atol=1e-12)
