"""Mixture of experts at every layout against one process, in fp64: loss, every gradient, the gradient norm, weights,
moments and balancing states after two steps."""

from __future__ import annotations

from functools import cache

import pytest

from megatron.core.collectives import Pending
from megatron.core.dropout import random_bits
from megatron.core.moe import dispatcher, load_balancing, router
from megatron.core.moe.router import sinkhorn_bias
from megatron.core.parallel_state import Axis
from megatron.testing.snapshot import Snapshot, first_difference, train_in_world
from tests.extensions import installed

BASE = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 100 "
    "--make-vocab-size-divisible-by 8 --lr 1e-2 --mock-data --global-batch-size 8 --train-iters 2 --eval-iters 0 "
    "--num-workers 0 --fp64 --cpu --disable-bias-linear --moe-ffn-hidden-size 24 "
)
MODELS = {
    "mixtral": "--swiglu --num-experts 8 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01",
    "deepseek": "--swiglu --num-experts 8 --moe-router-topk 3 --moe-layer-freq ([0]+[1]*2) "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 "
    "--moe-router-topk-scaling-factor 2.5 --moe-shared-expert-intermediate-size 16 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1",
    "groups": "--swiglu --num-experts 8 --moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2 "
    "--moe-router-score-function sqrtsoftplus --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 "
    "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate --moe-aux-loss-coeff 0.1",
    "two losses": "--swiglu --num-experts 8 --moe-router-load-balancing-type seq_aux_loss global_aux_loss "
    "--moe-aux-loss-coeff 0.1 0.3",
    "switch": "--num-experts 8 --moe-router-topk 1 --moe-router-pre-softmax --moe-layer-freq 2 "
    "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1",
    "drop": "--swiglu --num-experts 8 --moe-expert-capacity-factor 0.6 --moe-router-load-balancing-type none",
    "sinkhorn": "--swiglu --num-experts 8 --moe-router-load-balancing-type sinkhorn --moe-z-loss-coeff 0.01 "
    "--moe-expert-capacity-factor 0.7",
    "sinkhorn-one": "--num-experts 8 --moe-router-load-balancing-type sinkhorn --moe-router-topk 1",
    "forced": "--swiglu --num-experts 8 --moe-router-force-load-balancing --moe-aux-loss-coeff 0.1",
    "xielu": "--activation-func xielu --num-experts 8 --moe-shared-expert-intermediate-size 16 --moe-layer-freq 2",
    "many": "--swiglu --num-experts 64 --moe-router-topk 1 --moe-router-pre-softmax --moe-aux-loss-coeff 0.1",
}
ALLTOALL = "--moe-token-dispatcher-type alltoall"
PADDED = f"{ALLTOALL} --moe-pad-expert-input-to-capacity"
IN_TURNS = f"{ALLTOALL} --overlap-moe-expert-parallel-comm --micro-batch-size 1"
SP = "--tp 2 --sequence-parallel"
LAYOUTS = {
    "dp2": (2, "--micro-batch-size 2"),
    "ep2": (2, "--ep 2"),
    "ep4": (4, f"--ep 4 {ALLTOALL}"),
    "ep4-gather": (4, "--ep 4"),
    "ep8": (8, f"--ep 8 {ALLTOALL} --moe-grouped-gemm"),
    "ep8-gather": (8, "--ep 8"),
    "etp2": (2, f"--etp 2 {ALLTOALL}"),
    "etp2-ep2": (4, f"--etp 2 --ep 2 {ALLTOALL}"),
    "etp2-ep2-gather": (4, "--etp 2 --ep 2"),
    "tp2": (2, SP),
    "tp2-etp1-ep2": (2, f"{SP} --etp 1 --ep 2 {ALLTOALL}"),
    "tp2-etp1-ep4-dp2": (4, f"{SP} --etp 1 --ep 4 {ALLTOALL}"),
    "tp2-etp2-ep2-dp4": (8, f"{SP} --etp 2 --ep 2 {ALLTOALL}"),
    "tp2-etp1-dp2": (4, f"{SP} --etp 1"),
    "pp2-ep2-dp4": (8, f"--pp 2 --ep 2 {ALLTOALL}"),
    "pp2-mapping": (4, "--pp 2 --ep 2 --use-tp-pp-dp-mapping"),
    "zb-h1": (4, f"--pp 2 --ep 2 --pipeline-schedule zb-h1 {ALLTOALL}"),
    "whole-optimizer": (4, "--ep 2 --no-use-distributed-optimizer"),
    "overlapped": (4, "--ep 2 --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000"),
    "recomputed": (2, f"--ep 2 --recompute-granularity full --recompute-method uniform {ALLTOALL}"),
    "recomputed-moe": (2, "--ep 2 --recompute-granularity selective --recompute-modules moe core_attn"),
    "recomputed-act": (
        2,
        "--ep 2 --recompute-granularity selective --recompute-modules moe_act layernorm shared_experts",
    ),
    "cp2": (4, f"--cp 2 --ep 4 {ALLTOALL}"),
    "cp2-tp2": (4, f"--cp 2 {SP} --etp 1 --ep 2"),
    "in-turns": (2, f"--ep 2 {IN_TURNS}"),
    "zb-h2-in-turns": (4, f"--pp 2 --ep 2 --pipeline-schedule zb-h2 {IN_TURNS}"),
    "in-turns-tp2-recomputed": (
        8,
        f"{SP} --pp 2 --ep 2 --pipeline-schedule interleaved {IN_TURNS} --overlap-grad-reduce --overlap-param-gather "
        "--ddp-bucket-size 2000 --recompute-granularity full --recompute-method uniform",
    ),
    "padded-cp2": (4, f"--cp 2 --ep 4 {PADDED} --recompute-granularity selective --recompute-modules moe"),
    "tp2-etp4": (4, f"{SP} --etp 4"),
    "tp2-etp4-ep2": (8, f"{SP} --etp 4 --ep 2 {ALLTOALL}"),
    "cp2-tp2-etp4": (4, f"--cp 2 {SP} --etp 4 {ALLTOALL}"),
    "cp2-tp2-pp2-etp4": (8, f"--cp 2 {SP} --pp 2 --etp 4 --pipeline-schedule zb-h1 --use-tp-pp-dp-mapping"),
}
OTHERS = ("recomputed-moe", "padded-cp2", "zb-h2-in-turns")
PAIRS = [("mixtral", layout) for layout in LAYOUTS if layout not in OTHERS]
DEEPSEEK = (
    "etp2-ep2",
    "tp2-etp1-ep4-dp2",
    "pp2-ep2-dp4",
    "zb-h1",
    "recomputed-moe",
    "recomputed-act",
    "cp2-tp2",
    "tp2-etp4-ep2",
)
PAIRS += [("deepseek", name) for name in DEEPSEEK]
PAIRS += [("deepseek", "zb-h2-in-turns")]
PAIRS += [("groups", name) for name in ("ep4", "cp2-tp2", "zb-h1", "recomputed-act")]
PAIRS += [("two losses", name) for name in ("ep4", "cp2-tp2", "zb-h1")]
PAIRS += [("switch", name) for name in ("dp2", "ep4-gather", "tp2-etp1-ep2")]
DROP = ("dp2", "ep4", "ep8-gather", "tp2-etp2-ep2-dp4", "pp2-mapping", "cp2", "cp2-tp2", "cp2-tp2-etp4")
DROP += ("padded-cp2",)
PAIRS += [("drop", name) for name in DROP]
PAIRS += [("sinkhorn", name) for name in ("dp2", "recomputed", "cp2-tp2-etp4", "pp2-mapping")]
PAIRS += [("sinkhorn-one", name) for name in ("ep4-gather", "cp2-tp2", "zb-h1")]
PAIRS += [("forced", name) for name in ("dp2", "cp2-tp2", "tp2-etp1-dp2", "pp2-ep2-dp4", "recomputed-moe")]
PAIRS += [("xielu", name) for name in ("etp2-ep2", "tp2-etp1-ep4-dp2", "cp2-tp2-pp2-etp4", "recomputed-act")]
PAIRS += [("many", name) for name in ("ep4", "etp2-ep2-gather", "whole-optimizer")]
BY_NAME = {"-".join(pair): pair for pair in PAIRS if installed("overlap") or "in-turns" not in pair[1]}


def covering() -> list[str]:
    """Pairs that have each model once, and every second of those that add the other layouts. The last come first:
    mixtral has what is left."""
    models: list[str] = []
    layouts: list[str] = []
    seen: set[str] = set()
    for name, pair in reversed(BY_NAME.items()):
        if not seen.issuperset(pair):
            (layouts if pair[0] in seen else models).append(name)
            seen.update(pair)
    return models + layouts[::2]


@cache
def one_process(model: str) -> Snapshot:
    return train_in_world(1, (BASE + MODELS[model]).split())


@pytest.mark.grid("pair", covering(), list(BY_NAME))
def test_layout_equals_one_process(pair: str) -> None:
    compare(*BY_NAME[pair])


def compare(model: str, layout: str) -> None:
    world_size, flags = LAYOUTS[layout]
    found = train_in_world(world_size, f"{BASE} {MODELS[model]} {flags}".split())
    assert not found.replica_errors
    assert first_difference(one_process(model), found, 1e-9) is None


ON_DEVICE = [("mixtral", "ep2"), ("drop", "cp2-tp2-etp4"), ("deepseek", "etp2")]


@pytest.mark.parametrize(("model", "layout"), ON_DEVICE, ids=["-".join(pair) for pair in ON_DEVICE])
def test_layout_whose_counts_stay_on_the_device(model: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with grouped products."""
    monkeypatch.setattr(dispatcher, "on_device", lambda x: True)
    for name, kind in dispatcher.DISPATCHERS.items():
        build = lambda experts, ctx, grouped, padded, kind=kind: kind(experts, ctx, True, padded)  # noqa: E731
        monkeypatch.setitem(dispatcher.DISPATCHERS, name, build)
    compare(model, layout)


@pytest.mark.parametrize(
    ("model", "layout", "broken"),
    [
        ("sinkhorn", "cp2", ("sinkhorn_bias", lambda logits, places, sequence: sinkhorn_bias(logits, places, Axis()))),
        (
            "forced",
            "tp2-etp1-dp2",
            ("random_bits", lambda key, sample, places, n: random_bits(key, sample, places % 8, n)),
        ),
    ],
)
def test_comparison_notices_a_choice_by_local_places(
    model: str, layout: str, broken: tuple[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = one_process(model)
    monkeypatch.setattr(router, *broken)
    world_size, flags = LAYOUTS[layout]
    found = train_in_world(world_size, f"{BASE} {MODELS[model]} {flags}".split())
    assert first_difference(expected, found, 1e-9) is not None


def test_loads_of_one_rank_alone_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The auxiliary loss of the global batch needs the loads of all ranks."""
    monkeypatch.setattr(load_balancing, "start_all_reduce_", lambda x, axis: Pending(x))
    found = train_in_world(2, f"{BASE} {MODELS['mixtral']} {LAYOUTS['dp2'][1]}".split())
    first = first_difference(one_process("mixtral"), found, 1e-9)
    assert first is not None and first[0].startswith("step 1 gradient")


def test_tokens_that_see_the_same_are_dropped_by_place() -> None:
    """Ten words, of which each token sees two: many weights are equal but for rounding."""
    model = f"{BASE} --vocab-size 10 --num-experts 4 --moe-expert-capacity-factor 0.8 --position-embedding-type none "
    model += "--window-size 2 --attention-dropout 0 --hidden-dropout 0 --global-batch-size 4 --seed 2 --seq-length 32 "
    expected = train_in_world(1, model.split())
    assert first_difference(expected, train_in_world(2, (model + "--cp 2").split()), 1e-9) is None


def test_the_models_exercise_what_they_are_for() -> None:
    """Losses and drops change the gradient, the bias moves, and some experts have no token."""
    plain = train_in_world(1, (BASE + MODELS["mixtral"] + " --moe-aux-loss-coeff 0 --moe-z-loss-coeff 0").split())
    router = "gradient decoder.layers.1.mlp.router.weight"
    first = first_difference(plain, one_process("mixtral"), 1e-6)
    assert first is not None and first[0].startswith("step 1")
    assert not plain[f"step 1 {router}"].equal(one_process("mixtral")[f"step 1 {router}"])
    assert one_process("deepseek")["step 1 state decoder.layers.1.mlp.router.expert_bias"].abs().min() > 0.04
    gradient = one_process("many")["step 1 gradient decoder.layers.0.mlp.experts.linear_fc1.weight"]
    assert 0 < gradient.flatten(1).any(1).sum() < 64
    kept = train_in_world(1, (BASE + MODELS["drop"] + " --moe-expert-capacity-factor 100").split())
    assert first_difference(kept, one_process("drop"), 1e-3) is not None
