"""Routing by hashes: tables, the weights of outputs, and what is saved."""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.batch import Batch, BatchContext
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.parameters import model_states
from megatron.extensions.hash_routing.hash_router import HashRouter
from megatron.training.config.flags import with_fields
from tests.gpt_cases import FP64, logits_in_parts, model_of, random_batch

CONFIG = with_fields(model_of("sqrtsoftplus"), {"num_layers": 3, "moe_n_hash_layers": 2})


def test_choice_and_weights() -> None:
    """Experts of the table, weighted by the scores of the token."""
    model: Any = GPTModel(CONFIG, FP64).train()
    router, tokens = model.decoder.layers[1].mlp.router, random_batch(CONFIG).tokens
    x = torch.randn(CONFIG.seq_length, 3, CONFIG.hidden_size, dtype=torch.float64)
    choice = router(x, BatchContext.of(Batch.of_tokens(tokens)))
    for token in range(CONFIG.seq_length):
        for sample in range(3):
            experts = router.tid2eid[tokens[sample, token]]
            scores = torch.nn.functional.softplus(router.weight[experts] @ x[token, sample]).sqrt()
            assert choice.experts[token, sample].equal(experts)
            torch.testing.assert_close(choice.weights[token, sample], 2.5 * scores / scores.sum())


def test_tables_are_random_and_fixed() -> None:
    model, other = GPTModel(CONFIG, FP64), GPTModel(CONFIG, FP64, seed=5)
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
