"""Tests of the FLOPs that the planner counts in a fake step, and of formulas for activation memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.core.batch import Batch
from megatron.core.config.model import TransformerConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.distrib_optimizer import Update
from megatron.core.optimizer.optimizer import Rates
from megatron.core.pipeline_parallel.layer_split import multi_token_cost
from megatron.extensions.plan.planner.flops import flops_per_token, model_flops, update_flops
from megatron.testing.local_run import local_run
from megatron.training.config.arguments import parse_args
from megatron.training.config.flags import with_fields
from megatron.training.config.validation import resolve_legal
from megatron.training.extensions import load_extensions
from megatron.training.train_step import train_step
from tests import gpt_cases
from tests.forked import ROOT
from tests.harness import run_world
from tests.pure.test_model_math import PUBLISHED, STYLES, WITH_EXPERTS, shape
from tests.tiny import TINY


# A delta net is excluded, because it recomputes GEMMs, and model FLOPs do not include recomputation.
@pytest.mark.parametrize("style", [*sorted(STYLES.keys() - {"delta net"}), *WITH_EXPERTS])
def test_flops_agree_with_torch(style: str) -> None:
    """The FLOPs of linear layers equal those that torch counts. The attention kernel in this test computes the whole
    score matrix, which takes twice the FLOPs of causal attention. A kernel that recomputes the scores in the backward
    pass computes one more GEMM."""
    config = with_fields(TransformerConfig(**shape(4, 32, 4, 64, 128, 16)), (STYLES | WITH_EXPERTS)[style])
    model = GPTModel(config).train()
    tokens = torch.zeros(3, 16, dtype=torch.int64)
    batch = Batch(tokens=tokens, labels=tokens, loss_mask=torch.ones(3, 16), sample_index=torch.arange(3))
    batch = replace(batch.with_future(config.mtp_depths), aux_scale=torch.ones(()) if config.num_experts else None)
    # Weight gradients are added in place with an operation that torch's counter does not support: [m, n] += [m, k] x
    # [k, n].
    in_place = {torch.ops.aten.addmm_: lambda out, a, b, out_shape=None, **_: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        model(None, batch).backward()
    by_kind = counter.get_flop_counts()["Global"]
    linear = sum(by_kind.get(kind, 0) for kind in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_))
    counted = model_flops(config)
    assert linear == counted.matmul * tokens.numel()
    square = 2 * counted.attention * tokens.numel()
    scores_again = config.head_dim / (config.head_dim + config.value_head_dim) / 3
    assert counter.get_total_flops() - linear in (square, pytest.approx(square * (1 + scores_again), rel=1e-12))


def test_flops_of_layers_with_different_heads() -> None:
    """Keys have 8 channels, and values have 6. On average, the 4 heads of one layer attend to 8 of 16 tokens. The 6
    heads of the other layer have a window of 4 and attend to 4 - 4² / 32 tokens."""
    config = TransformerConfig(**shape(2, 32, 4, 64, 128, 16), **STYLES["own heads"] | {"window_size": 4})
    assert model_flops(config).attention == 2 * 3 * (8 + 6) * (4 * 8 + 6 * 3.5)


def test_flops_of_published_runs() -> None:
    """For Llama-3.1-8B with s = 8192, 10,682 tokens/s correspond to 550 TFLOP/s with causal attention."""
    llama = PUBLISHED["Llama-3-8B"][0]
    assert 10_682 * flops_per_token(llama) / 1e12 == pytest.approx(550, abs=0.5)
    full = 6.0 * 32 * 4096 * 8192
    assert model_flops(llama).attention == full


@pytest.mark.parametrize("style", ["gpt", "llama", "mistral", "experts"])
def test_stages_are_split_by_flops(style: str) -> None:
    """The cost of multi-token prediction modules, as a multiple of the cost of a layer, equals the ratio of their
    FLOPs."""
    experts = replace(gpt_cases.LLAMA, num_experts=4, moe_ffn_hidden_size=24, moe_layer_freq="([0]+[1]*2)")
    base = replace(experts if style == "experts" else gpt_cases.STYLES[style], num_layers=3)
    alone, both = (model_flops(replace(base, mtp_num_layers=depths)).total for depths in (None, 2))
    head = 6 * base.padded_vocab_size * base.hidden_size
    layer = (alone - head) / base.num_layers
    assert multi_token_cost(replace(base, mtp_num_layers=2)) == pytest.approx((both - alone) / layer, rel=1e-9)
    assert multi_token_cost(base) == 0


def _flops_of_an_update(rank, world_size, config):
    with local_run(config, rank, world_size) as run:
        train_step(run)
        with FlopCounterMode(display=False) as counter:
            run.optimizer.step(Update(Rates(1e-3)))
        return counter.get_total_flops()


def test_planned_flops_match_the_iterations() -> None:
    """The query, key, value, gate and up projections count as separate matrices. Embeddings, the output layer and norms
    do not count, because Muon does not orthogonalize their updates."""
    flags = f"{TINY} --swiglu --group-query-attention --num-query-groups 2 --optimizer muon --muon-num-ns-steps 3"
    config = resolve_legal(parse_args(flags.split()), 1)
    planned = update_flops(config.model, config.optimizer)
    assert run_world(1, _flops_of_an_update, config) == [planned] and planned > 0
    assert update_flops(config.model, replace(config.optimizer, optimizer="adam")) == 0


def test_planned_flops_of_a_chain_match_its_links() -> None:
    load_extensions([str(ROOT / "examples/shampoo.py")])
    config = resolve_legal(parse_args(f"{TINY} --swiglu --optimizer shampoo".split()), 1)
    planned = update_flops(config.model, config.optimizer)
    assert run_world(1, _flops_of_an_update, config) == [planned] and planned > 0
