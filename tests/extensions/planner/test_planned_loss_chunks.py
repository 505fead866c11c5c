"""If the output layer and the loss are computed in chunks of tokens, the planned bytes equal those of a real pipeline
stage. The tests compare the bytes that are kept between passes, and the peaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megatron.core.batch import Batch
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel, WeightSetup
from megatron.core.parallel_state import ParallelState, initialize_model_parallel
from megatron.core.pipeline_parallel.layout import Stage
from megatron.extensions.plan.planner.activations import ActivationPlan
from megatron.extensions.plan.planner.device_file import read_device
from megatron.extensions.plan.planner.fake_stage import Part, PlannerCache, StageParts
from megatron.extensions.plan.planner.flops import model_flops
from megatron.extensions.plan.planner.live_memory import LiveMemory
from megatron.extensions.plan.planner.loss_chunks import MOST_COST, SIZES, chosen_chunk
from megatron.extensions.plan.planner.memory import RankMemory, fullest, memory_of_ranks
from megatron.extensions.plan.planner.micro_batch import MicroBatch
from megatron.extensions.plan.planner.time.events import Move, Product
from megatron.extensions.plan.planner.time.step_time import StepTime, predict_step
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve_legal
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
    """Build a pipeline stage. Return the bytes that the stage keeps between its forward and backward pass, and the peak
    bytes of each pass. Weights and weight gradients are not counted."""
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
def test_planned_bytes_match_the_measured_ones(model: str, chunk: int, dtype: dict[str, bool]) -> None:
    batch = MicroBatch(MODELS[model], ModelParallelConfig(**dtype, loss_chunk_tokens=chunk), SAMPLES, "cpu")
    for stage in (HEAD, LAST):
        plan = ActivationPlan(batch).stage(stage)
        assert (plan.kept, plan.forward, plan.backward) == measured(batch, stage)


LAYOUTS: list[dict[str, object]] = [
    {"tensor_model_parallel_size": 2, "sequence_parallel": sequence} for sequence in (False, True)
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["tp", "sp"])
def test_saved_bytes_with_tensor_parallelism_match_the_plan(layout: dict[str, object]) -> None:
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
def test_chunks_do_not_add_flops(name: str) -> None:
    """Computing the loss in chunks changes neither the model FLOPs per token nor the FLOPs of a planned step."""
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
    """Each chunk reads and writes the weight gradient. The predicted step time includes these accesses."""
    moved = []
    for size in (0, 15):
        parallel = ModelParallelConfig(bf16=True, loss_chunk_tokens=size)
        plan = ActivationPlan(MicroBatch(GPT, parallel, SAMPLES, "cuda"))
        (part,) = plan.of([next(part for part in plan.single(LAST) if part.last)])
        moved.append(sum(each.sums for each in part.every if isinstance(each, Product)))
    chunks = -(-SAMPLES * GPT.seq_length // 15)
    weight = GPT.padded_vocab_size * GPT.hidden_size
    assert moved[1] - moved[0] == (chunks - 1) * 2 * 4 * weight


def test_chunks_on_gpus_move_as_much_as_all_tokens_at_once() -> None:
    """Apart from hidden states and weight gradients, computing the loss in chunks moves the same number of bytes,
    because the fused loss regions are also used in chunks."""
    moved = []
    for size in (0, 16):
        parallel = ModelParallelConfig(bf16=True, loss_chunk_tokens=size)
        found = StageParts(MicroBatch(LARGE, parallel, SAMPLES, "cuda")).of([Part(last=True)])
        moved.append(sum(each.moved for each in found[0].every if isinstance(each, Move)))
    assert moved[1] < 1.1 * moved[0]


SMALL_GPU_RUN = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 4096 --vocab-size 128000 "
    "--micro-batch-size 8 --global-batch-size 8 --mock-data --train-iters 10 --lr 1e-4 --bf16 "
    "--attention-dropout 0 --hidden-dropout 0 "
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
)


def test_a_plan_names_the_chunk_that_saves_memory() -> None:
    """The memory saving that the message states equals the saving in a plan with the suggested chunk size."""
    device = read_device("h100")
    config, cache = resolve_legal(parse_args(SMALL_GPU_RUN.split()), 1), PlannerCache()

    def memory_of(config: RunConfig) -> Sequence[RankMemory]:
        return memory_of_ranks(config, 1, cache)

    def step_of(config: RunConfig) -> StepTime:
        return predict_step(config, 1, device, None, cache)

    step, memory = step_of(config), memory_of(config)
    choice = chosen_chunk(config, 1, step, memory, step_of, memory_of)
    assert choice is not None and choice.cost <= MOST_COST
    assert choice.config.parallel.loss_chunk_tokens in SIZES
    fresh = resolve_legal(
        parse_args([*SMALL_GPU_RUN.split(), "--loss-chunk-tokens", str(choice.config.parallel.loss_chunk_tokens)]), 1
    )
    assert fullest(memory).total - fullest(memory_of_ranks(fresh, 1)).total == choice.saved > 2**30
    assert predict_step(fresh, 1, device).seconds / step.seconds - 1 == pytest.approx(choice.cost, abs=1e-6)
    assert chosen_chunk(fresh, 1, step, memory, step_of, memory_of) is None


def test_a_plan_names_no_chunk_that_saves_nothing() -> None:
    config, cache = resolve_legal(parse_args([*SMALL_GPU_RUN.split(), "--vocab-size", "1000"]), 1), PlannerCache()
    step = predict_step(config, 1, read_device("h100"), None, cache)
    found = chosen_chunk(
        config,
        1,
        step,
        memory_of_ranks(config, 1, cache),
        lambda other: predict_step(other, 1, read_device("h100"), None, cache),
        lambda other: memory_of_ranks(other, 1, cache),
    )
    assert found is None


FIGURES = {32768: (1.38, 0.69, 0.45), 131072: (4.38, 1.44, 0.64), 262144: (8.38, 2.44, 0.89)}
"""Peak memory of the loss in GiB, keyed by vocabulary size. The three values are for all tokens at once, for chunks of
4,096 tokens, and for chunks of 1,024 tokens."""


@pytest.mark.parametrize("vocab", FIGURES)
def test_plans_match_the_figures_of_the_docs(vocab: int) -> None:
    """The expected values are those that docs/tuning.md states."""
    wide = replace(LARGE, hidden_size=4096, kv_channels=128, num_attention_heads=32, seq_length=8192, vocab_size=vocab)
    plans = [
        ActivationPlan(MicroBatch(wide, ModelParallelConfig(bf16=True, loss_chunk_tokens=size), 2, "cuda")).stage(HEAD)
        for size in (0, 4096, 1024)
    ]
    kept = vocab / 2**15 + 0.25, 0.25, 0.25
    assert [plan.kept / 2**30 for plan in plans] == pytest.approx(kept, abs=0.005)
    assert [max(plan.forward, plan.backward) / 2**30 for plan in plans] == pytest.approx(FIGURES[vocab], abs=0.006)
