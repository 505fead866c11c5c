"""Tests of registries. The tests cover names, lazy imports, declared facts, and error messages that name the place of
registration."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from typing import Any, Protocol

import pytest
import torch
from torch import nn

from megatron.core.config.layers import LAYERS
from megatron.core.config.model import TransformerConfig
from megatron.core.config.moe import BALANCING_LOSSES, BALANCINGS, ROUTERS, SCORE_FUNCTIONS, Scores, router_of
from megatron.core.config.norms import NORMALIZATIONS
from megatron.core.dist_checkpointing.file_storage import STORAGES, LocalStorage, Storage
from megatron.core.models.gpt.gpt_model import GPTModel, WeightSetup
from megatron.core.moe.router import OwnScores, TopKRouter
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.pipeline_parallel.stage_parameters import count_parameters, model_states, stage_metas
from megatron.core.registry import NoFacts, Registry
from megatron.core.tensor_parallel.layers import TPContext, make_parameter
from megatron.core.transformer.layer import TransformerLayer
from megatron.core.transformer.mlp import MLP
from megatron.extensions import load
from megatron.extensions.interop.hugging_face.write_config import choose_family, config_to_hf
from megatron.extensions.interop.megatron_checkpoints.megatron_args import refuse_inexpressible
from megatron.training.config.run_config import RunConfig
from tests.gpt_cases import GPT


@dataclass(frozen=True)
class Facts:
    gated: bool = False


def test_parts_are_registered_by_call_and_by_decorator_in_order() -> None:
    registry: Registry[Any, Facts, ...] = Registry("--kind", Facts, protocol=object)

    @registry.register("b", gated=True)
    def part() -> None: ...

    registry.register("a", 7)
    assert (list(registry), len(registry), "a" in registry, "c" in registry) == (["b", "a"], 2, True, False)
    assert registry["b"] is part and registry["a"] == 7
    assert (registry.facts("b").gated, registry.facts("a").gated) == (True, False)


def test_a_part_given_as_text_is_imported_on_use() -> None:
    registry: Registry[Any, NoFacts, ...] = Registry("--kind", NoFacts, protocol=object)
    registry.register("prod", "math:prod")
    registry.register("missing", "math:there_is_no_such_thing")
    assert registry["prod"]([2, 3]) == 6
    with pytest.raises(AttributeError):
        registry["missing"]


def test_a_duplicate_name_is_refused_with_both_places() -> None:
    registry: Registry[Any, NoFacts, ...] = Registry("--kind", NoFacts, protocol=object)
    registry.register("a", 1)
    with pytest.raises(ValueError, match="--kind a is registered twice") as error:
        registry.register("a", 2)
    assert str(error.value).count(f"{__file__}:") == 2
    assert registry["a"] == 1


def test_an_error_about_an_unknown_name_lists_known_names() -> None:
    registry: Registry[Any, NoFacts, ...] = Registry("--kind", NoFacts, protocol=object)
    registry.register("cosine", 1)
    with pytest.raises(ValueError, match="--kind cosin: must be one of cosine; nearest: cosine, or give the --ext"):
        registry["cosin"]
    with pytest.raises(ValueError, match="--kind x: the keywords of register\\(\\) are none, and gated given"):
        registry.register("x", 1, gated=True)


class Going(Protocol):
    go: None

    def __call__(self, a: int, b: int, *, c: int) -> object: ...


def test_a_part_must_have_the_signature_of_its_kind() -> None:
    registry = Registry("--kind", Facts, protocol=Going)
    registry.register("text", "math:hypot")
    part: Any = type("Part", (), {"__init__": lambda self, a, b=0, c=0: None, "go": None})
    assert registry.register("fits", part) is part
    narrow: Any = type("Narrow", (), {"__init__": lambda self, a, b=0: None, "go": None})
    for wrong, said in (
        (narrow, r"must accept \(a, b, c=\), but accepts \(a, b=0\); correct its parameters"),
        (7, "has no go"),
    ):
        with pytest.raises(ValueError, match=f"--kind wrong: {said}"):
            registry.register("wrong", wrong)
    assert "wrong" not in registry
    with pytest.raises(ValueError, match="--kind text: has no go"):
        registry["text"]


def registries() -> list[Registry[Any, Any, ...]]:
    """Return all registries of the library."""
    load()
    modules = [module for name, module in sys.modules.items() if name.startswith("megatron.")]
    found = [part for module in modules for part in vars(module).values() if isinstance(part, Registry)]
    return list({id(part): part for part in found}.values())


def test_every_built_in_part_has_the_signature_of_its_kind() -> None:
    assert len(registries()) > 10
    for registry in registries():
        assert all(registry[name] is not None for name in registry)


def test_a_lazy_part_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    registry = Registry("--kind", NoFacts, protocol=Scale)
    check = registry._check
    monkeypatch.setattr(registry, "_check", lambda name, part: checked.append(name) or check(name, part))
    registry.register("text", "math:sin")
    assert [registry["text"](0), registry["text"](0), checked] == [0, 0, ["text"]]


def test_a_substitute_is_built_where_it_applies() -> None:
    registry: Registry[Any, NoFacts, ...] = Registry("--kind", NoFacts, protocol=object)
    registry.register("root", "math:sqrt")
    registry.substitute("root", "math:isqrt", when=lambda x: isinstance(x, int))
    assert (registry.build("root", 6.25), registry.build("root", 17)) == (2.5, 4)
    assert registry["root"](16) == 4.0, "the name still refers to the part itself"


def test_parameters_count_as_the_constructor_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm with an additional parameter must not be counted or exported as an RMSNorm, even if a module of the
    library registers it."""
    monkeypatch.setattr(NORMALIZATIONS, "_entries", dict(NORMALIZATIONS._entries))
    library: dict[str, Any] = {
        "__name__": "megatron.extensions.own.flags",
        "NORMALIZATIONS": NORMALIZATIONS,
        "Norm": ScaledNorm,
    }
    exec("NORMALIZATIONS.register('own', Norm)", library)
    own = replace(GPT, normalization="own")
    norms, width = 2 * own.num_layers + 1, own.hidden_size
    assert count_parameters(own).norms == count_parameters(replace(GPT, normalization="RMSNorm")).norms + norms * width
    built = GPTModel(own, weights=WeightSetup("meta", initialize=False))
    assert [parameter.meta for parameter in built.parameters()] == stage_metas(own)
    with pytest.raises(ValueError, match="normalization = 'own'"):
        choose_family(own)
    with pytest.raises(ValueError, match="--normalization own"):
        refuse_inexpressible(RunConfig(model=own))


def test_parameters_of_a_layer_may_depend_on_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LAYERS, "_entries", dict(LAYERS._entries))

    @LAYERS.register("widening")
    class WideningLayer(TransformerLayer):
        def build_mlp(self, name: str, config: TransformerConfig, ctx: TPContext) -> MLP:
            return MLP(name, config, ctx, ffn_size=8 * (ctx.layer + 1))

    own = replace(GPT, layer_module="widening")
    widths = {meta.name: meta.global_shape for meta in stage_metas(own)}
    found = [widths[f"decoder.layers.{number}.mlp.linear_fc2.weight"][1] for number in range(own.num_layers)]
    assert found == [8 * (number + 1) for number in range(own.num_layers)]


def test_states_that_are_not_trained_are_not_parameters() -> None:
    biased = replace(GPT, num_experts=4, moe_router_topk=2, moe_router_enable_expert_bias=True)
    states = {f"decoder.layers.{number}.mlp.router.expert_bias" for number in range(GPT.num_layers)}
    assert {meta.name for meta, dtype in model_states(biased) if dtype == "float32"} == states
    assert not states & {meta.name for meta in stage_metas(biased)}
    assert model_states(GPT) == []


def test_a_router_without_a_flag_has_no_name_in_other_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ROUTERS, "_entries", dict(ROUTERS._entries))
    ROUTERS.register("own", "megatron.core.moe.router:TopKRouter", when=lambda config, number: True)
    with pytest.raises(ValueError, match="router own"):
        config_to_hf(EXPERTS, "mixtral")
    with pytest.raises(ValueError, match="router own"):
        refuse_inexpressible(RunConfig(model=EXPERTS))


EXPERTS = replace(GPT, num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=32)


class ScaledNorm(nn.Module):
    """RMSNorm variant with a second learnable parameter, `scale`."""

    def __init__(
        self, name: str, size: int, config: TransformerConfig, ctx: TPContext, partial_over: tuple[str, ...]
    ) -> None:
        super().__init__()
        metas = scaled_norm_metas(name, size, partial_over, config)
        self.weight, self.scale = (make_parameter(meta, ctx) for meta in metas)


def scaled_norm_metas(
    name: str, size: int, partial_over: tuple[str, ...], config: TransformerConfig
) -> list[ParamMeta]:
    return [
        ParamMeta(f"{name}.{key}", (size,), {}, Init("ones"), partial_over, role="norm") for key in ("weight", "scale")
    ]


class Scale(Protocol):
    def __call__(self, x: float) -> float: ...


class Store(Protocol):
    size: int

    def keep(self, value: int) -> None: ...


class MakeStore(Protocol):
    def __call__(self, config: int, *, name: str) -> Store: ...


def test_protocols_describe_registered_parts() -> None:
    scales = Registry("--scale", Facts, protocol=Scale)
    scales.register("sin", "math:sin", gated=True)
    assert scales["sin"](0.0) == 0.0
    with pytest.raises(ValueError, match=r"--scale atan2: must accept \(x\), but accepts \(y, x, /\)"):
        scales.register("atan2", math.atan2)

    stores = Registry("--store", NoFacts, protocol=MakeStore, makes=Store)
    kept: Any = type("Kept", (), {"__init__": lambda self, config, *, name: None, "keep": None, "size": 3})
    assert stores.register("kept", kept) is kept
    lossy: Any = type("Lossy", (), {"__init__": lambda self, config, *, name: None})
    with pytest.raises(ValueError, match="--store lossy: has no keep, size"):
        stores.register("lossy", lossy)
    hasty: Any = type("Hasty", (kept,), {"keep": lambda self: None})
    with pytest.raises(ValueError, match=r"--store hasty: keep\(\) must accept \(value\), but accepts \(\); correct"):
        stores.register("hasty", hasty)
    with pytest.raises(ValueError, match=r"--store nameless: must accept \(config, name=\)"):
        stores.register("nameless", lambda config: kept(config, name=""))


@pytest.mark.parametrize(
    ("left_out", "changed", "said"),
    [
        ("remove", {}, r"storage lacking: has no remove\(\) of its own; define it"),
        (
            "",
            {"write": lambda self, path: None},
            r"storage lacking: write\(\) must accept \(path, data\), but accepts \(path\)",
        ),
    ],
)
def test_a_storage_without_all_its_methods_is_refused(left_out: str, changed: dict[str, Any], said: str) -> None:
    """A storage class is checked when it is registered. Otherwise, a missing method would be detected only when a
    checkpoint is saved."""
    methods = {name: getattr(LocalStorage, name) for name in ("names", "size", "read", "write", "remove")} | changed
    methods.pop(left_out, None)
    with pytest.raises(ValueError, match=said):
        STORAGES.register("lacking", type("Lacking", (Storage,), methods))


def test_a_registry_of_objects_accepts_only_its_class() -> None:
    plain = Registry("--plain", NoFacts, protocol=Facts)
    assert plain.register("made", Facts(gated=True)).gated and plain["made"].gated
    with pytest.raises(ValueError, match="--plain called: must be a Facts, but is a type; register an instance"):
        plain.register("called", Facts)


def test_a_router_declares_its_scores_and_balancing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ROUTERS, "_entries", dict(ROUTERS._entries))

    @ROUTERS.register("own", when=lambda config, number: number > 0, scores=("own_scores",), balancings=("own_way",))
    class OwnRouter(TopKRouter):
        @staticmethod
        def make_scores(config: TransformerConfig) -> Scores:
            return OwnScores(torch.exp)

    assert "own_scores" in SCORE_FUNCTIONS and "own_way" in BALANCINGS and "own_way" not in BALANCING_LOSSES
    assert [router_of(EXPERTS, number) for number in range(2)] == ["top_k", "own"]
    model = replace(EXPERTS, moe_router_score_function="own_scores")
    built = GPTModel(model, weights=WeightSetup("meta", initialize=False))
    routers = [layer.mlp.router for layer in built.decoder.layers]
    assert [type(router) for router in routers] == [TopKRouter] + [OwnRouter] * (model.num_layers - 1)
    assert all(router.scores == OwnScores(torch.exp) for router in routers)
    with pytest.raises(ValueError, match="router nameless: must accept \\(name, config, ctx\\)"):
        ROUTERS.register("nameless", type("Nameless", (OwnRouter,), {"__init__": lambda self, config, ctx: None}))
    ROUTERS.register("twin", OwnRouter, scores=("own_scores",))
    with pytest.raises(
        ValueError, match="own_scores must be listed by exactly one router, but is listed by own and twin"
    ):
        SCORE_FUNCTIONS.router("own_scores")
