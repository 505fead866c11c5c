"""Tests that compare the multipliers of muP and CompleteP with the papers and with Megatron-LM. The parity matrix
(tests/parity) tests muP under parallel layouts."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest
import torch

from megatron.core.models.gpt.gpt_model import GPTModel, WeightSetup
from megatron.core.param_meta import ParamMeta
from megatron.extensions.optim.mup.flags import MupFlags
from megatron.extensions.optim.mup.rule import MupRule
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import findings, resolve, resolve_legal
from tests.tiny import TINY

MODEL = f"{TINY} --num-layers 4 --hidden-size 64 --num-attention-heads 16 --untie-embeddings-and-output-weights"
BASE = "--use-mup --mup-base-hidden-size 16"
DEPTH = "--mup-base-num-layers 2"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear"

HIDDEN, RESIDUAL = "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc2.weight"
ROUTER, NORM = "decoder.layers.0.mlp.router.weight", "decoder.layers.0.input_layernorm.weight"
EMBEDDING, OUTPUT, FINAL = "embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight"
HEADS = "decoder.layers.0.self_attention.q_layernorm.weight"


def config_of(flags: str) -> RunConfig:
    return resolve_legal(parse_args(f"{MODEL} {flags}".split()), 1)


def metas_of(config: RunConfig) -> dict[str, ParamMeta]:
    with torch.device("meta"):
        model = GPTModel(config.model, weights=WeightSetup("meta", initialize=False))
    return {name: meta for name, (_, meta) in model.named_metas().items()}


def rates(flags: str, *names: str) -> dict[str, tuple[float, float, float]]:
    """Return the multipliers of learning rate, epsilon and weight decay, keyed by parameter name."""
    config = config_of(flags)
    metas = metas_of(config)
    groups = {name: config.optimizer.group_of(metas[name]) for name in names}
    return {name: (group.lr_mult, group.eps_mult, group.wd_mult) for name, group in groups.items()}


def stds(flags: str, *names: str) -> list[float]:
    """Return the standard deviations of the initial values of parameters."""
    config = config_of(flags)
    initial = replace(config.model.initial, rules=config.optimizer.parameter_rules)
    # Without --use-mup, the metadata contains the initial values before any rule changes them.
    metas = metas_of(config_of(flags.replace("--use-mup", "")))
    found = [initial.complete(replace(metas[name], init=None)).init for name in names]
    return [each.std for each in found if each is not None]


ADAM = {
    HIDDEN: (1 / 4, 1 / 4, 4),
    RESIDUAL: (1 / 4, 1 / 4, 4),
    EMBEDDING: (1, 1 / 4, 1),
    OUTPUT: (1, 1 / 4, 1),
    NORM: (1, 1 / 4, 0),
    FINAL: (1, 1 / 4, 0),
    HEADS: (1, 1, 0),
}
SGD = {HIDDEN: (1, 1, 1), EMBEDDING: (4, 1, 1 / 4), OUTPUT: (4, 1, 1 / 4), NORM: (4, 1, 0), HEADS: (1, 1, 0)}
TABLES = [
    ("--qk-layernorm", ADAM),
    ("--qk-layernorm --optimizer sgd", SGD),
    (EXPERTS, {ROUTER: (1 / 4, 1, 4), EMBEDDING: (1, 1 / 4, 1)}),
    (f"{EXPERTS} --optimizer sgd", {ROUTER: (1 / 4, 1, 4)}),
    ("--optimizer muon", {HIDDEN: (1 / 2, 1, 2), OUTPUT: (1, 1 / 4, 1)}),
    (f"--optimizer muon {EXPERTS}", {ROUTER: (1 / 4, 1, 4)}),
    ("--optimizer muon --muon-scale-mode unit_rms_norm", {HIDDEN: (1, 1, 1), OUTPUT: (1, 1 / 4, 1)}),
    (f"--optimizer muon --muon-scale-mode shape_scaling {EXPERTS}", {ROUTER: (1 / 2, 1, 2)}),
    ("--optimizer muon --muon-scalar-optimizer sgd", {OUTPUT: (4, 1, 1 / 4)}),
    (f"{EXPERTS} --optimizer muon --moe-router-skip-muon", {ROUTER: (1 / 4, 1, 4)}),
    (DEPTH, {HIDDEN: (1 / 4, 1 / 8, 4), EMBEDDING: (1, 1 / 4, 1), NORM: (1, 1 / 8, 0), FINAL: (1, 1 / 4, 0)}),
    (f"{DEPTH} --optimizer sgd", {HIDDEN: (2, 1, 1 / 2), EMBEDDING: (4, 1, 1 / 4), NORM: (8, 1, 0)}),
]


@pytest.mark.parametrize(("flags", "table"), TABLES)
def test_rates_epsilons_and_decays_match_the_papers(flags: str, table: dict[str, tuple[float, float, float]]) -> None:
    """The expected values follow from table 8 of arXiv 2203.03466 for four times the width, and from table 1 of arXiv
    2505.01618 for twice the depth."""
    assert rates(f"{BASE} {flags}", *table) == table


FC1_BIAS = "decoder.layers.0.mlp.linear_fc1.bias"
LATENT = "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 6 --qk-pos-emb-head-dim 2"
LATENT += " --v-head-dim 4 --position-embedding-type rope --qk-layernorm"
DOWN, UP, LATENT_NORM, PROJECTION = (
    f"decoder.layers.0.self_attention.{name}.weight"
    for name in ("linear_q_down_proj", "linear_q_up_proj", "q_layernorm", "linear_proj")
)


def test_constant_widths_have_separate_factors() -> None:
    """The multipliers depend on the fan-in of each matrix (table 8 of arXiv 2203.03466). The hidden size is four times
    that of the base model, but the width of MLPs or latents is unchanged."""
    own = "--ffn-hidden-size 64 --mup-base-widths ffn-hidden-size=64"
    wanted = {HIDDEN: (1 / 4, 1, 4), RESIDUAL: (1, 1 / 4, 1), FC1_BIAS: (1, 1, 0), NORM: (1, 1 / 4, 0)}
    assert rates(f"{BASE} {own}", *wanted) == wanted
    assert rates(f"{BASE} {own} --optimizer sgd", HIDDEN, RESIDUAL) == {HIDDEN: (1 / 4, 1, 4), RESIDUAL: (4, 1, 1 / 4)}
    muon = rates(f"{BASE} {own} --optimizer muon", HIDDEN, RESIDUAL)
    assert [each[0] for each in muon.values()] == [1 / 4, 1]
    assert stds(f"{BASE} {own} --init-method-std 0.1", HIDDEN, RESIDUAL) == pytest.approx([0.05, 0.1 / sqrt(8)])
    ranks = "--mup-base-widths q-lora-rank=16 kv-lora-rank=8"
    wanted = {DOWN: (1 / 4, 1, 4), UP: (1, 1 / 4, 1), LATENT_NORM: (1, 1, 0), PROJECTION: (1 / 4, 1 / 4, 4)}
    assert rates(f"{BASE} {LATENT} {ranks}", *wanted) == wanted
    # This norm gets wider with the model, unlike the norm of a head.
    assert rates(f"{BASE} {LATENT}", LATENT_NORM) == {LATENT_NORM: (1, 1 / 4, 0)}
    heads = "--kv-channels 4 --mup-base-widths num-attention-heads=16"
    assert rates(f"{BASE} {heads}", PROJECTION) == {PROJECTION: (1, 1 / 4, 1)}
    resolved = config_of(f"{BASE} {own}")
    assert resolve(resolved, 1) == resolved


def test_initial_values_match_the_papers() -> None:
    flags = f"{BASE} --init-method-std 0.1"
    assert stds(flags, HIDDEN, EMBEDDING, OUTPUT) == pytest.approx([0.05, 0.1, 0.1])
    assert stds(flags, RESIDUAL) == pytest.approx([0.05 / sqrt(8)])
    assert stds(f"{flags} {EXPERTS}", ROUTER) == pytest.approx([0.025])
    deep = [stds(f"{flags} --mup-base-num-layers 1 --num-layers {layers}", RESIDUAL)[0] for layers in (1, 4, 16)]
    assert deep == pytest.approx([0.05 / sqrt(2)] * 3)  # the standard deviation does not depend on the depth


def test_multipliers_follow_the_sizes() -> None:
    model = config_of(f"{BASE} {DEPTH} --mup-embedding-mult 3 --mup-base-head-dim 16").model
    assert (model.embedding_multiplier, model.logits_scaling, model.residual_multiplier) == (3, 4, 0.5)
    assert model.attention_scale == 4 / 4
    assert config_of(f"{BASE} --mup-attn-scale-power 0.5").model.attention_scale == 1 / 2
    assert config_of(f"{BASE} --softmax-scale 0.3").model.attention_scale == 0.3
    assert config_of(f"{BASE} --mup-output-mult 0.5").model.logits_scaling == 2
    latent = "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 6 --qk-pos-emb-head-dim 2 --v-head-dim 4"
    latent += " --position-embedding-type rope --rotary-scaling-factor 4 --mscale-all-dim 0.7"
    usual, scaled = (config_of(flags).model.attention_scale for flags in (latent, f"{BASE} {latent}"))
    assert scaled == pytest.approx(usual / sqrt(8))  # YaRN's factor remains


def test_resolving_twice_changes_nothing() -> None:
    config = config_of(f"{BASE} {DEPTH} --mup-output-mult 0.3")
    assert resolve(config, 1) == config
    own = config.model.options(MupFlags)
    assert (own.mup_width_mult, own.mup_depth_mult) == (4, 2)


def test_the_base_model_equals_the_model_without_mup() -> None:
    """Attention scores are an exception, because their factor depends on the width of the base model's heads."""
    base = "--use-mup --mup-base-hidden-size 64 --mup-base-num-layers 4 --mup-base-head-dim 4"
    plain, own = config_of(""), config_of(base)
    model = {name: getattr(own.model, name) for name in ("embedding_multiplier", "logits_scaling")}
    assert set(model.values()) == {1} and own.model.attention_scale == plain.model.attention_scale
    for meta in metas_of(own).values():
        assert own.optimizer.group_of(meta) == plain.optimizer.group_of(meta)
        rule = MupRule(own.optimizer)
        assert meta.init is not None and rule.initial(replace(meta, init=None), meta.init) == meta.init


PROBLEMS = [
    ("--logits-scaling 3", "--logits-scaling 3.0: must be 4 or omitted with --use-mup, which sets it"),
    ("--mup-width-mult 3", "--mup-width-mult 3.0: must be 4 according to the sizes of the model and the base model"),
    (f"{DEPTH} --norm-placement sum", "--mup-base-num-layers 2: cannot be combined with --norm-placement sum"),
    ("--optimizer lion", "--optimizer lion: has Adam's learning rate factors under --use-mup"),
    ("--mup-base-widths depth=3", "--mup-base-widths depth=3: must be NAME=NUMBER with one of num-attention-heads, "),
    (
        "--num-query-groups 2 --group-query-attention --mup-base-widths ffn-hidden-size=64",
        "must have num-query-groups=NUMBER: 1/4 of its 2 in this model is not a whole number",
    ),
    (
        "--mup-parameter-widths x=1,1",
        "--mup-parameter-widths x=1,1: does not match the sizes of the model and the base model",
    ),
    ("--mup-base-hidden-size 0", "--mup-base-hidden-size 0: must be above 0"),
]


@pytest.mark.parametrize(("flags", "message"), PROBLEMS)
def test_problems_state_a_remedy(flags: str, message: str) -> None:
    found = findings(parse_args(f"{MODEL} {BASE} {flags}".split()), 1)
    assert any(message in str(problem) for problem in found), [*map(str, found)]


def test_factors_match_megatron_lm() -> None:
    """The multipliers and initial values under muP equal those of Megatron-LM (commit 0044db1f), except where this
    program follows the papers."""
    width = 4.0
    found = rates(f"{BASE} --qk-layernorm", *ADAM)
    assert found[HIDDEN][:2] == found[RESIDUAL][:2] == (1 / width, 1 / width)
    assert found[EMBEDDING][0] == found[NORM][0] == 1
    sgd = rates(f"{BASE} --optimizer sgd", EMBEDDING, NORM, HIDDEN)
    assert [each[0] for each in sgd.values()] == [width, width, 1]
    assert rates(f"{BASE} --optimizer muon --muon-scale-mode unit_rms_norm", HIDDEN)[HIDDEN][0] == 1
    assert config_of(BASE).model.logits_scaling == width
    assert config_of(BASE).model.attention_scale == 1 / 4 and stds(BASE, HIDDEN) == pytest.approx([0.02 / sqrt(width)])
    theirs = {"output": 1 / width, "epsilon of vectors": 1.0, "epsilon of embeddings": 1.0}
    ours = {"output": found[OUTPUT][0], "epsilon of vectors": found[NORM][1]}
    ours["epsilon of embeddings"] = found[EMBEDDING][1]
    assert ours == {"output": 1.0, "epsilon of vectors": 1 / width, "epsilon of embeddings": 1 / width} != theirs


def test_a_plan_prints_the_table() -> None:
    config = config_of(f"{BASE} {DEPTH} --mup-base-head-dim 4 {EXPERTS}")
    (rule,) = config.optimizer.parameter_rules
    lines = list(rule.lines(metas_of(config).values()))
    assert lines[0] == (
        "muP: 4 times as wide as the base model, 2 times as deep; embeddings x 1, logits x 0.25, sublayers x 0.5, "
        "attention scores x sqrt(4) / channels^1"
    )
    router = "muP, router: initial values x 0.25, lr x 0.25, epsilon x 0.5, weight decay x 4; "
    assert [line for line in lines if line.startswith("muP, router")] == [f"{router}4 parameters, 1,024 elements"]
