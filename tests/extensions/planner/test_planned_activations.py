"""The planned activation memory equals the memory that real pipeline stages keep between a forward pass and its
backward pass.

By default, each test runs only every n-th case of a group of cases. With --whole, each test runs all cases.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.core import compiled_regions
from megatron.core.batch import Batch
from megatron.core.config.model import TransformerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel, WeightSetup
from megatron.core.parallel_state import ParallelState, initialize_model_parallel
from megatron.core.pipeline_parallel.layout import Stage
from megatron.core.transformer.activation_store import build_store
from megatron.core.transformer.pass_context import PassContext
from megatron.extensions.plan.planner.activations import ActivationPlan
from megatron.extensions.plan.planner.live_memory import LiveMemory
from megatron.extensions.plan.planner.micro_batch import MicroBatch
from megatron.extensions.speed.fp8.flags import Fp8Flags
from megatron.extensions.speed.fp8.recipes import DelayedGemms
from megatron.training.config.flags import config_of_sections
from tests.gpt_cases import GPT, LLAMA, STYLES, with_dropout
from tests.harness import run_world

SAMPLES = 3
WHOLE, FIRST = Stage(range(2)), Stage([0], last=False)
MIDDLE, LAST = Stage([0, 1], first=False, last=False), Stage([1], first=False)
RECOMPUTE = {
    "none": {},
    "full": {"recompute_granularity": "full"},
    "groups of 2": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "core_attn": {"recompute_granularity": "selective"},
    "layernorm": {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)},
    "mlp_act": {"recompute_granularity": "selective", "recompute_modules": ("mlp_act",)},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
    "moe_act": {"recompute_granularity": "selective", "recompute_modules": ("moe_act",)},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ("moe",)},
    "shared_experts": {"recompute_granularity": "selective", "recompute_modules": ("shared_experts", "mlp")},
    "all": {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm", "mlp", "mlp_act")},
}
LATENTS = {"recompute_granularity": "selective", "recompute_modules": ("mla_up_proj", "layernorm")}
Case = tuple[str, TransformerConfig, ModelParallelConfig, Stage]
Found = tuple[str, tuple[int, int], tuple[int, int]]


OFFLOAD = {"cpu_offloading": True, "cpu_offloading_num_layers": 1, "min_offloaded_tensor_size": 1}


def parallel_config(**fields: Any) -> ModelParallelConfig:
    """Return a parallel configuration with the given fields. Fields of extensions are also allowed."""
    return config_of_sections({"parallel": fields}).parallel


def settle(live: LiveMemory) -> None:
    """Wait until no more memory is freed. The wait is necessary because gloo's threads free send buffers with a
    delay."""
    same, before = 0, -1
    while same < 3:
        time.sleep(0.01)
        same = same + 1 if before == live.now else 0
        before = live.now


def kept_by(batch: MicroBatch, stage: Stage, state: ParallelState) -> tuple[int, int]:
    """Build a pipeline stage and run its forward pass. Return the bytes that stay allocated, except for the weights and
    the output, and the bytes of host buffers."""
    model = batch.model
    offload = build_store(batch.parallel, batch.device)
    passes, weights = PassContext(offload=offload), WeightSetup(batch.device, initialize=False)
    built = GPTModel(model, batch.parallel, state, stage, passes=passes, weights=weights).train()
    dtype, rows = getattr(torch, batch.parallel.params_dtype), model.seq_length // state.cp.size
    rows //= state.tp.size if batch.parallel.sequence_parallel else 1
    whole = Batch.of_tokens(torch.zeros(batch.samples, model.seq_length, dtype=torch.int64))
    local = whole.with_future(model.mtp_depths).local_to(state.cp)
    local = replace(local, aux_scale=torch.ones((), dtype=torch.float64)).to(batch.device)
    given = [parameter.untyped_storage()._cdata for parameter in built.parameters()]
    given += [x.untyped_storage()._cdata for x in vars(local).values() if isinstance(x, torch.Tensor)]
    scaling = [part for part in built.modules() if isinstance(part, DelayedGemms)]
    given += [x.untyped_storage()._cdata for part in scaling for x in (part.amax, part.multiplier)]
    with LiveMemory() as live:
        on_host = live.count_apart(offload.pool) if offload is not None else []
        hidden = None
        if not stage.first:
            hidden = torch.zeros(
                rows, batch.samples, model.residual_size, dtype=dtype, device=batch.device
            ).requires_grad_()
        output = built(hidden, local)
    if state.tp.size * state.cp.size > 1:
        settle(live)
    given.append(output.untyped_storage()._cdata)
    return sum(size for key, size in live.sizes.items() if key not in given), sum(on_host)


def planned_for(batch: MicroBatch, stage: Stage) -> tuple[int, int]:
    """Return the plan's prediction for the result of `kept_by`."""
    plan = ActivationPlan(batch).stage(stage)
    return plan.kept, sum(size * number for size, number in plan.host.of_size.items())


def kept_in_bf16(model: TransformerConfig, **more: Any) -> int:
    """Return the planned activation bytes of a middle pipeline stage with two layers."""
    batch = MicroBatch(replace(model, **more), ModelParallelConfig(bf16=True), SAMPLES, "cpu")
    return ActivationPlan(batch).stage(MIDDLE).kept


def differing(world_size: int, cases: list[Case]) -> list[Found]:
    """Return one tuple (case, planned bytes, measured bytes) for each case and rank where planned and measured bytes
    differ."""
    plans = [planned_for(MicroBatch(model, parallel, SAMPLES, "cpu"), stage) for _, model, parallel, stage in cases]
    return [case for found in run_world(world_size, compare, cases, plans) for case in found]


def compare(rank: int, world_size: int, cases: list[Case], plans: list[tuple[int, int]]) -> list[Found]:
    """Return one tuple (case, planned bytes, measured bytes) for each case where planned and measured bytes differ on
    this rank."""
    states: dict[tuple[int, int], ParallelState] = {}
    found = []
    for (name, model, parallel, stage), planned in zip(cases, plans, strict=True):
        sizes = parallel.tensor_model_parallel_size, parallel.context_parallel_size
        if sizes not in states:
            tp, cp = sizes
            states[sizes] = ParallelState() if world_size == 1 else initialize_model_parallel(tp, 1, cp)
        measured = kept_by(MicroBatch(model, parallel, SAMPLES, "cpu"), stage, states[sizes])
        if planned != measured:
            found.append((name, planned, measured))
    return found


def styles() -> dict[str, TransformerConfig]:
    found = {}
    for name, model in STYLES.items():
        found |= {name: model, f"{name} dropout": with_dropout(model)}
    found["llama layernorm"] = replace(LLAMA, normalization="LayerNorm")
    found["gpt rmsnorm"] = replace(GPT, normalization="RMSNorm")
    found["one group"] = replace(LLAMA, num_query_groups=1)
    found["qk, no rope"] = replace(STYLES["qwen3"], position_embedding_type="none")
    return found


def grid(
    models: Mapping[str, TransformerConfig],
    kinds: Iterable[str],
    parallels: Sequence[ModelParallelConfig],
    stages: Sequence[Stage],
) -> list[Case]:
    """Return one case for each pair of a model and a kind of recomputation. Consecutive cases cycle through the
    parallel configurations and the stages."""
    return [
        (f"{name} {kind} {number}", replace(model, **RECOMPUTE[kind]), parallel, stage)
        for number, ((name, model), kind) in enumerate(product(models.items(), kinds))
        for parallel, stage in [(parallels[number % len(parallels)], stages[number % len(stages)])]
    ]


def in_fp8(recipe: str, fp8_format: str = "hybrid", **fields: Any) -> ModelParallelConfig:
    return parallel_config(bf16=True, fp8_format=fp8_format, fp8_recipe=recipe, **fields)


BF16 = ModelParallelConfig(bf16=True)
OF_DTYPES = [ModelParallelConfig(**{dtype: True}) for dtype in ("bf16", "fp32", "bf16", "fp64")]
EVEN = replace(LLAMA, num_experts=8, moe_ffn_hidden_size=48)
EXPERTS = {
    "softmax": EVEN,
    "softmax first": replace(EVEN, moe_router_pre_softmax=True),
    "sigmoid": replace(EVEN, moe_router_score_function="sigmoid", moe_token_dispatcher_type="alltoall"),
    "shared": replace(EVEN, moe_shared_expert_intermediate_size=64, swiglu=False, squared_relu=True),
    "every second layer": replace(EVEN, moe_layer_freq="2"),
    "gated": replace(EVEN, moe_shared_expert_intermediate_size=64, moe_shared_expert_gate=True),
    "groups": replace(EVEN, moe_router_num_groups=4, moe_router_group_topk=1, moe_aux_loss_coeff=(0.1,)),
    "biased": replace(EVEN, swiglu=False, quick_geglu=True, activation_func_clamp_value=1.0, add_bias_linear=True),
    "weights on inputs": replace(EVEN, moe_router_topk=1, moe_apply_probs_on_input=True),
}
EXPERT_KINDS = ("none", "full", "moe", "moe_act", "shared_experts", "layernorm", "mlp")
DROPOUT, MOE = {"dropout": with_dropout(GPT)}, replace(EVEN, moe_layer_freq="2")
OF_FP8 = STYLES | DROPOUT | {"relu2": replace(GPT, squared_relu=True), "experts": MOE}
OF_FP8["shared"] = replace(MOE, moe_shared_expert_intermediate_size=64)
RECIPES = [in_fp8(recipe) for recipe in ("delayed", "tensorwise", "blockwise", "rowwise")]


def offloaded() -> list[Case]:
    """Return cases that offload the first layer of a stage. The cases compare activation bytes on the device and the
    bytes of host buffers. All activations of the offloaded layer go to host memory, except those that routing saves."""
    parallels = [parallel_config(bf16=True, **OFFLOAD), in_fp8("delayed", **OFFLOAD)]
    return grid(STYLES | DROPOUT | {"experts": EVEN}, RECOMPUTE, parallels, (WHOLE, MIDDLE, FIRST))


LAYOUTS = [
    ModelParallelConfig(tensor_model_parallel_size=2, bf16=True),
    ModelParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True, bf16=True),
    ModelParallelConfig(context_parallel_size=2, bf16=True),
    ModelParallelConfig(context_parallel_size=2, cp_comm_type="all_gather", bf16=True),
    ModelParallelConfig(context_parallel_size=2, cp_comm_type="a2a", fp32=True),
]
FP8_LAYOUT = in_fp8("tensorwise", "e4m3", tensor_model_parallel_size=2, sequence_parallel=True)
FEW_KINDS, OF_NORMS = ("none", "core_attn", "all", "full"), ("none", "full", "layernorm", "all")


def over_two_ranks() -> list[Case]:
    """Return cases that combine each model style with some kinds of recomputation. Consecutive cases cycle through the
    layouts and the stages."""
    found = grid(STYLES | DROPOUT, FEW_KINDS, LAYOUTS, (WHOLE, LAST, MIDDLE))
    of_fp8 = {name: STYLES[name] for name in ("gpt", "llama", "qwen3", "bloom")}
    found += grid(of_fp8, FEW_KINDS, [FP8_LAYOUT], (WHOLE, LAST, MIDDLE))
    latents = [replace(STYLES["latent"], **LATENTS)] if "latent" in STYLES else []
    return found + [(f"latents {at}", model, each, WHOLE) for model in latents for at, each in enumerate(LAYOUTS)]


FUSED = replace(BF16, compile=True)
GRIDS: dict[str, tuple[int, int, Callable[[], list[Case]]]] = {
    "styles": (1, 151, lambda: grid(styles(), RECOMPUTE, OF_DTYPES, (WHOLE, LAST, MIDDLE, FIRST))),
    "offload": (1, 113, offloaded),
    "experts": (1, 11, lambda: grid(EXPERTS, EXPERT_KINDS, [BF16], [WHOLE])),
    # With fp8, one-byte casts of inputs are saved. The casts replace inputs that only the GEMM saves, and take
    # additional memory if other operations save the same input.
    "fp8": (1, 151, lambda: grid(OF_FP8, RECOMPUTE, RECIPES, [WHOLE])),
    "fused regions": (1, 61, lambda: grid(styles(), OF_NORMS, [FUSED], (WHOLE, LAST, MIDDLE))),
    "layouts": (2, 7, over_two_ranks),
}
"""Dictionary that maps each group of cases to the number of ranks, the stride n, and a function that returns all cases.
Without --whole, a test runs every n-th case."""


@pytest.mark.grid("whole", [False], [True])
@pytest.mark.parametrize("name", GRIDS)
def test_saved_activations_equal_the_plan(name: str, whole: bool) -> None:
    world_size, stride, cases = GRIDS[name]
    with mock.patch.object(compiled_regions, "_compiled", lambda function, static: function):
        assert differing(world_size, cases()[:: 1 if whole else stride]) == []


def test_fused_regions_save_at_most_the_bytes_that_they_replace() -> None:
    """Fused regions must not save more bytes for the backward pass than the unfused operations."""
    for model in (GPT, LLAMA):
        batches = (MicroBatch(model, each, SAMPLES, "cuda") for each in (BF16, FUSED))
        plain, fused = (ActivationPlan(each).stage(WHOLE).kept for each in batches)
        assert fused <= plain


@pytest.mark.parametrize("kind", ["none", "full", "all"])
def test_offloading_keeps_the_input_of_a_stage_on_the_device(kind: str) -> None:
    model = replace(LLAMA, **RECOMPUTE[kind])
    kept = [
        ActivationPlan(MicroBatch(model, parallel_config(bf16=True, **more), SAMPLES, "cpu")).stage(MIDDLE)
        for more in ({}, OFFLOAD | {"cpu_offloading_num_layers": 2})
    ]
    rotary = 2 * model.seq_length * model.head_dim // 2 * 2  # bf16 cosines and sines
    assert kept[1].kept == SAMPLES * model.seq_length * model.hidden_size * 2 + rotary
    assert kept[1].kept + kept[1].offloaded == kept[0].kept


@pytest.mark.parametrize(
    "fp8", [Fp8Flags(), Fp8Flags(fp8_format="hybrid"), Fp8Flags(fp8_format="e4m3", fp8_recipe="blockwise")]
)
def test_grouped_gemms_on_gpus_can_be_planned(fp8: Fp8Flags) -> None:
    """On GPUs, the row counts are device tensors, and fake device tensors have no values. With grouped GEMMs, the layer
    therefore saves the row offsets of the experts instead of their row counts."""
    even = replace(LLAMA, num_experts=8, moe_ffn_hidden_size=48, moe_token_dispatcher_type="alltoall")
    kept = [
        ActivationPlan(MicroBatch(model, ModelParallelConfig(bf16=True, extension_options=(fp8,)), SAMPLES, "cuda"))
        .stage(MIDDLE)
        .kept
        for model in (even, replace(even, moe_grouped_gemm=True))
    ]
    assert kept[1] == pytest.approx(kept[0], rel=0.01)


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_weight_gradients_in_fp8_need_no_memory_on_gpus(recipe: str) -> None:
    """On a GPU, the GEMMs of fp8 weight gradients add their products to the gradient directly. The temporary memory of
    the backward pass is therefore smaller than the output of one such GEMM."""
    model = replace(LLAMA, hidden_size=256, ffn_hidden_size=1024, num_layers=3)
    parallel = in_fp8(recipe)
    product = 2 * model.hidden_size * model.ffn_size * 2
    more = {
        device: memory.backward - memory.kept
        for device in ("cuda", "cpu")
        for memory in [ActivationPlan(MicroBatch(model, parallel, 1, device)).stage(MIDDLE)]
    }
    assert more["cuda"] < product < more["cpu"]


def test_recomputation_of_experts_saves_memory() -> None:
    """There are 8 experts, of which each token uses 2, and a shared expert. The test checks which activations of a
    layer remain when experts are recomputed."""
    model = replace(EVEN, moe_shared_expert_intermediate_size=64)
    kept = {}
    for kind in EXPERT_KINDS:
        kept[kind] = kept_in_bf16(model, **RECOMPUTE[kind])
    tokens, layers = SAMPLES * model.seq_length, 2
    assert kept["mlp"] == kept["none"]
    activated = 2 * tokens * layers * (2 * 48 + 64)  # bytes of the bf16 inputs of the second linear layers
    assert kept["none"] - kept["moe_act"] == activated
    assert kept["none"] - kept["shared_experts"] == 2 * tokens * layers * 3 * 64
    assert kept["moe"] < kept["moe_act"] - activated


def test_experts_over_ranks_match_the_plan_on_average() -> None:
    """The plan assumes balanced routing. The actual message sizes depend on the router, but the activation memory
    summed over the ranks is within three percent of the plan."""
    model = replace(LLAMA, hidden_size=128, kv_channels=16, seq_length=64, num_experts=8, moe_ffn_hidden_size=128)
    layout = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    parallel = ModelParallelConfig(**layout, sequence_parallel=True, bf16=True)
    planned, measured = zip(*run_world(2, kept_with_experts, MicroBatch(model, parallel, SAMPLES, "cpu")), strict=True)
    assert sum(measured) == pytest.approx(sum(planned), rel=0.03)


def kept_with_experts(rank: int, world_size: int, batch: MicroBatch) -> tuple[int, int]:
    state = initialize_model_parallel(2, 1, 1, 2, 1)
    return ActivationPlan(batch).stage(MIDDLE).kept, kept_by(batch, MIDDLE, state)[0]


def test_gradients_summed_in_bf16_need_one_fp32_product_at_a_time() -> None:
    """If weight gradients are summed in fp32, a GPU adds the product of 16-bit matrices to the sum directly. If they
    are summed in bf16, the product is first stored in fp32, and only one such product exists at a time."""
    parallel = ModelParallelConfig(bf16=True)
    batch = MicroBatch(replace(LLAMA, vocab_size=4096), parallel, 1)
    both = (replace(batch, bf16_sums=sums) for sums in (False, True))
    with_fp32, with_bf16 = (ActivationPlan(each).stage(LAST).backward for each in both)
    assert with_bf16 - with_fp32 == 4 * 4096 * LLAMA.hidden_size
