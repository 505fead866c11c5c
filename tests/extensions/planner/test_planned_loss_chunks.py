"""Planned bytes of a head and a loss in chunks of tokens are those of a built stage: what it keeps, and its peaks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megatron.core.batch import Batch
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel, WeightSetup
from megatron.core.models.stage import Stage
from megatron.core.parallel_state import ParallelState, initialize_model_parallel
from megatron.extensions.planner.activations import ActivationPlan
from megatron.extensions.planner.flops import model_flops
from megatron.extensions.planner.live_memory import LiveMemory
from megatron.extensions.planner.micro_batch import MicroBatch
from megatron.extensions.planner.time.events import Product
from tests.extensions.planner.test_planned_activations import LAST, SAMPLES, parallel_config, settle
from tests.gpt_cases import GPT, LLAMA
from tests.harness import run_world

HEAD = Stage([], first=False, last=True)
LARGE = replace(LLAMA, vocab_size=4096, untie_embeddings_and_output_weights=True, hidden_dropout=0.0)
MODELS = {
    "plain": LARGE,
    "cap": replace(LARGE, final_logit_softcapping=2.0, z_loss_coeff=0.1),
    "bias": replace(LARGE, add_output_layer_bias=True, logits_scaling=2.0),
    "further tokens": replace(LARGE, mtp_num_layers=2),
}
DTYPES = [{"bf16": True}, {"fp32": True}]


def forget_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def measured(batch: MicroBatch, stage: Stage, state: ParallelState | None = None) -> tuple[int, int, int]:
    """Bytes that a built stage keeps between forward and backward, and the most in either, its weights and their
    gradients excluded."""
    weights = WeightSetup("cpu", initialize=False)
    built = GPTModel(batch.model, batch.parallel, state, stage, weights=weights).train()
    dtype = getattr(torch, batch.parallel.params_dtype)
    for parameter in built.parameters():
        main_grad = torch.zeros(parameter.shape, dtype=getattr(torch, batch.parallel.main_dtype))
        parameter.main_grad = main_grad  # type: ignore[attr-defined]
        parameter.register_post_accumulate_grad_hook(forget_gradient)
    rows = batch.model.seq_length
    tokens = torch.zeros(batch.samples, rows, dtype=torch.int64)
    given = replace(Batch.of_tokens(tokens), aux_scale=torch.ones((), dtype=torch.float64))
    given = given.with_future(batch.model.mtp_depths)
    rows //= state.tp.size if state is not None and batch.parallel.sequence_parallel else 1
    with LiveMemory() as live:
        hidden = None
        if not stage.first:
            hidden = torch.zeros(rows, batch.samples, batch.model.hidden_size, dtype=dtype).requires_grad_()
        loss = built(hidden, given)
        forward = live.peak
        node, gradient = get_gradient_edge(loss), loss.new_ones(())
        del loss
        if state is not None:
            settle(live)
        kept = live.now - gradient.nbytes
        live.restart_peak()
        torch.autograd.backward([node], [gradient])
        return kept, forward, live.peak


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
@pytest.mark.parametrize("chunk", [0, 16, 1000])
@pytest.mark.parametrize("model", MODELS)
def test_bytes_are_the_plans(model: str, chunk: int, dtype: dict[str, bool]) -> None:
    batch = MicroBatch(MODELS[model], ModelParallelConfig(**dtype, loss_chunk_tokens=chunk), SAMPLES, "cpu")
    for stage in (HEAD, LAST):
        plan = ActivationPlan(batch).stage(stage)
        assert (plan.kept, plan.forward, plan.backward) == measured(batch, stage)


LAYOUTS: list[dict[str, object]] = [
    {"tensor_model_parallel_size": 2, "sequence_parallel": sequence} for sequence in (False, True)
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["tp", "sp"])
def test_bytes_kept_over_tensor_parallel_ranks_are_the_plans(layout: dict[str, object]) -> None:
    batches = [
        MicroBatch(model, parallel_config(bf16=True, loss_chunk_tokens=16, **layout), SAMPLES, "cpu")
        for model in MODELS.values()
    ]
    plans = [ActivationPlan(batch).stage(LAST).kept for batch in batches]
    assert run_world(2, kept_on_rank, batches) == [plans, plans]


def kept_on_rank(rank: int, world_size: int, batches: list[MicroBatch]) -> list[int]:
    state = initialize_model_parallel(world_size, 1, 1)
    return [measured(batch, LAST, state)[0] for batch in batches]


def test_chunks_leave_one_tensor_of_the_size_of_the_hidden_states() -> None:
    tokens = SAMPLES * LARGE.seq_length
    whole, chunks = (
        ActivationPlan(MicroBatch(LARGE, ModelParallelConfig(bf16=True, loss_chunk_tokens=size), SAMPLES, "cpu")).stage(
            HEAD
        )
        for size in (0, 12)
    )
    assert whole.kept - chunks.kept >= 2 * tokens * LARGE.vocab_size * (1 - 12 / tokens)
    assert chunks.forward < whole.forward / 2


@pytest.mark.parametrize("name", ["plain", "further tokens"])
def test_chunks_multiply_no_more(name: str) -> None:
    """Model FLOPs of a token do not depend on chunks, and a planned step multiplies as much."""
    model = MODELS[name]
    counted = []
    for size in (0, 16):
        parallel = ModelParallelConfig(bf16=True, loss_chunk_tokens=size)
        found = ActivationPlan(MicroBatch(model, parallel, SAMPLES, "cuda"))
        (part,) = found.of([next(part for part in found.single(LAST) if part.last)])
        products = [each for each in part.every if isinstance(each, Product)]
        counted.append(sum(each.batches * each.m * each.n * each.k for each in products))
    assert counted[1] == counted[0] > 0
    assert model_flops(model).total > 0


def test_gradients_of_a_chunk_are_added_to_the_sum() -> None:
    """Each chunk reads and writes the weight gradient, which a prediction of the step's time counts."""
    moved = []
    for size in (0, 15):
        parallel = ModelParallelConfig(bf16=True, loss_chunk_tokens=size)
        plan = ActivationPlan(MicroBatch(GPT, parallel, SAMPLES, "cuda"))
        (part,) = plan.of([next(part for part in plan.single(LAST) if part.last)])
        moved.append(sum(each.sums for each in part.every if isinstance(each, Product)))
    chunks = -(-SAMPLES * GPT.seq_length // 15)
    weight = GPT.padded_vocab_size * GPT.hidden_size
    assert moved[1] - moved[0] == (chunks - 1) * 2 * 4 * weight
