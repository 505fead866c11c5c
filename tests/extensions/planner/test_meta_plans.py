"""A plan for a GPU is the same whether it is computed with meta tensors or with fake tensors. Plans use fake tensors if
parts of the model do not run on meta tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch

from megatron.core.pipeline_parallel.layer_split import pipeline_stages
from megatron.core.pipeline_parallel.stages import whole_model
from megatron.core.transformer.mlp import MLP
from megatron.extensions.attention.sparse_attention import selection, sparse_attention
from megatron.extensions.plan.planner import fake_stage
from megatron.extensions.plan.planner.activations import ActivationPlan
from megatron.extensions.plan.planner.fake_stage import Part, PlannerCache, StageParts, Unit
from megatron.extensions.plan.planner.micro_batch import MicroBatch
from megatron.extensions.plan.planner.time.events import Event, PassEvents, Product, StageMemory
from megatron.extensions.plan.planner.time.recorder import Recorder
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve_legal
from tests.apart import python_apart

BASE = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --vocab-size 512 --mock-data --lr 1e-4 "
    "--train-iters 1 --micro-batch-size 2 --global-batch-size 32 --bf16"
)
LLAMA = f"{BASE} --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
EXPERTS = f"{LLAMA} --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm"
ALLTOALL = f"{EXPERTS} --expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall"
LATENT = "--multi-latent-attention --kv-lora-rank 32 --q-lora-rank 64 --qk-head-dim 16 --qk-pos-emb-head-dim 8"
CASES = {
    "gpt": f"{BASE} --tp 2",
    "dropout": f"{BASE} --attention-dropout 0.1 --hidden-dropout 0.1",
    "llama": f"{LLAMA} --tp 2 --sequence-parallel --group-query-attention --num-query-groups 2",
    "untied": f"{LLAMA} --untie-embeddings-and-output-weights --qk-layernorm --recompute-activations",
    "ring": f"{LLAMA} --cp 4 --attention-dropout 0 --hidden-dropout 0",
    "ulysses": f"{LLAMA} --cp 2 --cp-comm-type a2a --attention-dropout 0 --hidden-dropout 0",
    "nested": f"{LLAMA} --cp 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2 --attention-dropout 0",
    "zero-bubble": f"{LLAMA} --pp 2 --pipeline-schedule zb-v --attention-dropout 0 --hidden-dropout 0",
    "delayed": f"{LLAMA} --fp8-format hybrid",
    "blockwise": f"{LLAMA} --fp8-format hybrid --fp8-recipe blockwise",
    "offload": f"{LLAMA} --cpu-offloading --cpu-offloading-num-layers 2",
    "offloaded attention": f"{LLAMA} --cpu-offloading --cpu-offloading-num-layers 2 --min-offloaded-tensor-size 1 "
    "--attention-dropout 0 --hidden-dropout 0",
    "window": f"{LLAMA} --window-size 32 --window-attn-skip-freq 2 --softmax-type learnable",
    "latent": f"{LLAMA} {LATENT} --v-head-dim 16",
    "mtp": f"{LLAMA} --mtp-num-layers 1",
    "experts": f"{ALLTOALL} --moe-shared-expert-intermediate-size 64",
    "gathered experts": f"{EXPERTS} --expert-model-parallel-size 2 --tp 2 --sequence-parallel",
    "fp8 experts": f"{ALLTOALL} --fp8-format hybrid --fp8-recipe blockwise",
}


def batch_of(flags: str) -> MicroBatch:
    return MicroBatch.of(resolve_legal(parse_args(flags.split()), 8))


def plans_of(batch: MicroBatch) -> tuple[list[list[PassEvents]], list[StageMemory]]:
    """Return the planned events and the planned memory of each pipeline stage."""
    stages = pipeline_stages(batch.model, batch.parallel)
    cache = PlannerCache()
    plan = ActivationPlan(batch, cache)
    return cache.parts_of(batch, stages), [plan.stage(stage) for stage in stages]


@pytest.mark.parametrize("case", CASES)
def test_plans_on_meta_tensors_equal_those_on_fake_tensors(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(CASES[case])
    found = []
    for meta in (True, False):
        monkeypatch.setattr(fake_stage, "planned", lambda batch, work, meta=meta: work(meta))
        found.append(plans_of(batch))
    assert found[0] == found[1]
    assert found[0][0][0] and found[0][1][0].kept


DSA = f"{LLAMA} {LATENT} --v-head-dim 16 --seq-length 1024 --experimental-attention-variant dsa --dsa-indexer-n-heads 2"
DSA = f"{DSA} --dsa-indexer-head-dim 16 --dsa-indexer-topk 200 --dsa-indexer-loss-coeff 1"
DSA = f"{DSA} --attention-dropout 0 --hidden-dropout 0"
DELTA_NET = "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 --seq-length 2048"
LOOPS = {
    "selected keys": f"{DSA} --dsa-indexer-use-sparse-loss",
    "selected keys, zigzag parts": f"{DSA} --cp 2 --tp 2 --sequence-parallel",
    "states": f"{LLAMA} {DELTA_NET}",
    "states of Mamba": f"{LLAMA} --hybrid-layer-pattern M-M* --seq-length 4096",
}


def totals(events: Iterable[Event]) -> Counter[str]:
    """Return the total FLOPs of all GEMMs. Also return, for each type of event, the number of events and the number of
    bytes that they move."""
    found: Counter[str] = Counter()
    for event in events:
        kind = type(event).__name__
        found += Counter({kind: 1, f"{kind}, bytes": getattr(event, "moved", 0)})
        if isinstance(event, Product):
            found["FLOPs"] += 2 * event.batches * event.m * event.n * event.k
    return found


@pytest.mark.parametrize("case", LOOPS)
def test_a_few_iterations_represent_the_whole_loop(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_attention, "CHUNK", 2**18)
    monkeypatch.setattr(selection, "MERGED_ROWS", 64)
    batch, run = batch_of(LOOPS[case]), Counter[str]()

    def counted(name: str, goes: Callable[[Recorder, Sequence[Any]], Iterable[Any]]) -> PassEvents:
        def parts_of(recorder: Recorder, parts: Sequence[Any]) -> Iterator[Any]:
            for part in goes(recorder, parts):
                run[name] += 1
                yield part

        monkeypatch.setattr(Recorder, "some_of", parts_of)
        return StageParts(batch).of([Part((Unit((0,)),))])[0]

    some, every = counted("some", Recorder.some_of), counted("every", lambda recorder, parts: parts)
    assert some.memory == every.memory
    assert totals(some.forward) == totals(every.forward) and totals(some.backward) == totals(every.backward)
    assert run["some"] < run["every"]


def test_a_module_that_reads_values_is_planned_on_fake_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(CASES["llama"])
    known = ActivationPlan(batch).stage(whole_model(batch.model))
    tried, stages = [], fake_stage.fake_stages

    def noted(batch: MicroBatch, meta: bool = False) -> Any:
        tried.append(meta)
        return stages(batch, meta)

    forward = MLP.forward

    def reads(mlp: MLP, x: torch.Tensor, context: Any) -> Any:
        assert x[0, 0, :2].tolist() == [0.0, 0.0]
        return forward(mlp, x, context)

    monkeypatch.setattr(fake_stage, "fake_stages", noted)
    monkeypatch.setattr(MLP, "forward", reads)
    assert ActivationPlan(batch).stage(whole_model(batch.model)) == known
    assert tried and tried == [True, False] * (len(tried) // 2)


def test_plans_for_cpus_use_fake_tensors() -> None:
    batch = MicroBatch(batch_of(CASES["gpt"]).model, batch_of(CASES["gpt"]).parallel, 1, "cpu")
    assert fake_stage.planned(batch, lambda meta: meta) is False
    assert fake_stage.planned(batch_of(CASES["gpt"]), lambda meta: meta) is True


def test_an_error_on_both_devices_has_the_message_of_fake_tensors() -> None:
    def fails(meta: bool) -> None:
        raise ValueError(f"on {'meta' if meta else 'fake'} tensors")

    with pytest.raises(ValueError, match="on fake tensors"):
        fake_stage.planned(batch_of(CASES["gpt"]), fails)


PLANNED_FIRST = """
import sys
from megatron.extensions.plan.planner import as_on_gpus
from tests.extensions.planner.test_meta_plans import CASES, batch_of, plans_of

for name in ("delayed", "window", "fp8 experts"):
    plans_of(batch_of(CASES[name]))
import megatron.extensions.speed.fusions.hooks
for module in [module for name, module in sys.modules.items() if name.startswith("megatron.")]:
    kept = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == as_on_gpus.__name__]
    assert not kept or module.__name__.startswith("megatron.extensions.plan.planner."), (module, kept)
"""


def test_a_run_after_a_plan_uses_the_original_functions() -> None:
    """A module that is first imported while a plan is made must not keep the functions that planning replaces."""
    python_apart("-c", PLANNED_FIRST, code=0)
