"""Tests of hash routing: the hash tables, and the values that are saved for the backward pass. The tests in
tests/extensions/hugging_face compare selected experts and their weights with those of DeepSeek-V4."""

from __future__ import annotations

import torch

from megatron.core.batch import Batch
from megatron.core.models.gpt.gpt_model import GPTModel, WeightSetup
from megatron.core.pipeline_parallel.stage_parameters import model_states
from megatron.extensions.moe.hash_routing.hash_router import HashRouter
from megatron.training.config.flags import with_fields
from tests.gpt_cases import FP64, logits_in_parts, model_of, random_batch

CONFIG = with_fields(model_of("sqrtsoftplus"), {"num_layers": 3, "moe_n_hash_layers": 2})


def test_tables_are_random_and_fixed() -> None:
    model, other = GPTModel(CONFIG, FP64), GPTModel(CONFIG, FP64, weights=WeightSetup(seed=5))
    tables = {meta.name: dtype for meta, dtype in model_states(CONFIG)}
    assert tables == {
        "decoder.layers.0.mlp.router.tid2eid": "int64",
        "decoder.layers.1.mlp.router.tid2eid": "int64",
        "decoder.layers.2.mlp.router.expert_bias": "float32",
    }
    named, others = model.named_metas(), other.named_metas()
    assert {name for name, (parameter, _) in named.items() if not parameter.requires_grad} == tables.keys()
    first, second = (named[name][0] for name in list(tables)[:2])
    assert first.shape == (101, 3) and first.dtype == torch.int64 and not first.equal(second)
    assert not first.equal(others["decoder.layers.0.mlp.router.tid2eid"][0])
    rows = first.sort(1).values
    assert (rows[:, 1:] > rows[:, :-1]).all() and 0 <= int(rows.min()) < int(rows.max()) < 8
    counts = first.flatten().bincount(minlength=8)
    assert (counts - 101 * 3 / 8).abs().max() < 20
    routers = [layer.mlp.router for layer in model.decoder.layers]
    assert [isinstance(router, HashRouter) for router in routers] == [True, True, False]
    assert [router.balance.has_loss for router in routers] == [False, False, True]


def test_generation() -> None:
    model, tokens = GPTModel(CONFIG, FP64).eval(), random_batch(CONFIG).tokens
    found, _ = logits_in_parts(model, tokens, (1, 6, 1, 3, 5))
    torch.testing.assert_close(found, model.logits(None, Batch.of_tokens(tokens)), rtol=1e-12, atol=1e-12)
