"""Tests of flags that set the kind of each layer with a pattern. A model with one sublayer per layer equals the
corresponding model with two sublayers per layer. A pattern can also determine the pipeline stages and the multi-token
prediction modules."""

from __future__ import annotations

import pytest
import torch

from megatron.core.config.layers import Span
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.layer_split import pipeline_stages, stage_costs
from megatron.training.config.arguments import parse_args
from megatron.training.config.flags import named_value, with_fields
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve
from tests.gpt_cases import FP64, model_of, random_batch

BASE = "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 60 --lr 1 --mock-data --train-iters 1 "


def config_of(flags: str, ranks: int = 1) -> RunConfig:
    return resolve(parse_args((BASE + flags).split()), ranks)


@pytest.mark.parametrize("style", ["gpt", "llama", "sandwich", "mixtral"])
def test_two_layers_of_one_sublayer_are_one_layer_of_two(style: str) -> None:
    """A model whose layers have one sublayer each is compared with a model whose layers have two sublayers. The loss
    and every gradient of the two models are bit-identical."""
    config = model_of(style)
    letters = "*E" if config.num_experts else "*-"
    hybrid = with_fields(config, {"num_layers": 4, "hybrid_layer_pattern": letters * 2})
    ours, theirs = GPTModel(config, FP64), GPTModel(hybrid, FP64)

    def name_of(name: str) -> str:
        """Return the name that a parameter has in the model with two sublayers per layer."""
        if not name.startswith("decoder.layers."):
            return name
        number, rest = name.removeprefix("decoder.layers.").split(".", 1)
        assert int(number) % 2 == ("mlp" in rest)
        return f"decoder.layers.{int(number) // 2}.{rest}"

    known = {name: parameter for name, (parameter, _) in ours.named_metas().items()}
    found = {name_of(name): parameter for name, (parameter, _) in theirs.named_metas().items()}
    assert known.keys() == found.keys()
    with torch.no_grad():
        for name, parameter in found.items():
            parameter.copy_(known[name])
    for model in (ours, theirs):
        model(None, random_batch(config)).backward()
    assert all(torch.equal(parameter.grad, known[name].grad) for name, parameter in found.items())


def test_initial_weights_are_divided_by_the_number_of_sublayers() -> None:
    config = model_of("gpt")
    hybrid = with_fields(config, {"num_layers": 4, "hybrid_layer_pattern": "*-*-"})
    assert hybrid.initial == config.initial


def test_letters_define_layers_stages_and_modules() -> None:
    config = config_of("--hybrid-layer-pattern *|-*-/*-/- --pp 2", 2)
    model = config.model
    assert (model.num_layers, model.mtp_num_layers, named_value(config, "hybrid_layer_pattern")) == (4, 2, "*-*-/*-/-")
    assert [[*stage.layers] for stage in pipeline_stages(model, config.parallel)] == [[0], [1, 2, 3]]
    assert [kind.mixes for kind in model.layers] == [True, False, True, False]
    assert [kind.mlp for kind in model.layers] == [False, True, False, True]
    assert [(kind.mixes, kind.mlp) for kind in model.mtp_layers] == [(True, True), (False, True)]
    assert model.dense_layers == (1, 3)


def test_more_stages_than_ranks_are_interleaved() -> None:
    config = config_of("--hybrid-layer-pattern *-|*|-|*- --pp 2", 2)
    assert config.parallel.schedule == "interleaved"
    assert [len(stage.layers) for stage in pipeline_stages(config.model, config.parallel)] == [2, 1, 1, 2]


def test_the_cost_of_a_stage_depends_on_its_kinds_of_layers() -> None:
    """Layer costs are in units of the mean cost of a layer. In this model, the matrices of an MLP have twice as many
    elements as those of attention. Only attention computes scores."""
    config = config_of("--hybrid-layer-pattern ***|--- --pp 2", 2)
    first, last = stage_costs(config.model, config.parallel)
    h, s = config.model.hidden_size, config.model.seq_length
    attention, mlp, head = 4 * h * h + h * s, 8 * h * h, config.model.padded_vocab_size * h
    mean = (attention + mlp) / 2
    assert first == pytest.approx(3 * attention / mean) and last == pytest.approx((3 * mlp + head) / mean)


def test_modules_without_letters_are_like_the_last_layer() -> None:
    config = config_of("--hybrid-layer-pattern *--* --mtp-num-layers 1").model
    assert [(kind.mixes, kind.mlp) for kind in config.mtp_layers] == [(True, False)]


def test_windows_apply_to_layers_with_attention() -> None:
    layers = config_of("--hybrid-layer-pattern *-*- --window-size 4 --position-embedding-type rope").model.layers
    assert [kind.span.window for kind in layers] == [4, None, 4, None]
    assert [kind.rotation is None for kind in layers] == [False, True, False, True]


ROPE = "--num-layers 4 --position-embedding-type rope "


def test_periods_match_megatron() -> None:
    """Depending on the flag, the last of every N layers has full attention or no rotary embedding."""
    model = config_of(f"{ROPE} --window-size 5 --window-attn-skip-freq 4 --no-rope-freq 2").model
    assert [kind.span for kind in model.layers] == [Span(5)] * 3 + [Span()]
    assert [kind.rotation is not None for kind in model.layers] == [True, False, True, False]


def test_layers_with_a_window_may_have_another_rotary_base() -> None:
    flags = "--window-size 5 --window-attn-skip-freq [0,1,1,0] --window-rotary-base 500"
    rotations = [kind.rotation for kind in config_of(ROPE + flags).model.layers]
    found = [(rotation.base, rotation.scaled) for rotation in rotations if rotation]
    assert found == [(10000.0, True), (500.0, False), (500.0, False), (10000.0, True)]
