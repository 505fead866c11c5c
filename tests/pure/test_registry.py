"""Registries: names, lazy parts, facts, and errors that say where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from torch import nn

from megatron.core import parts
from megatron.core.config.model import TransformerConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.parameters import extension_parts, is_declared, parameter_metas
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.pipeline_parallel.stage_parameters import (
    built_metas,
    check_declared,
    count_parameters,
    stage_metas,
)
from megatron.core.pipeline_parallel.stages import whole_model
from megatron.core.registry import NoFacts, Registry
from megatron.core.tensor_parallel.layers import TPContext, make_parameter
from tests.gpt_cases import GPT


@dataclass(frozen=True)
class Facts:
    gated: bool = False


def test_parts_are_registered_by_call_and_by_decorator_in_order() -> None:
    registry: Registry[Any, Facts] = Registry("--kind", Facts)

    @registry.register("b", gated=True)
    def part() -> None: ...

    registry.register("a", 7)
    assert (list(registry), len(registry), "a" in registry, "c" in registry) == (["b", "a"], 2, True, False)
    assert registry["b"] is part and registry["a"] == 7
    assert (registry.facts("b").gated, registry.facts("a").gated) == (True, False)


def test_a_registry_knows_which_parts_are_built_in() -> None:
    assert parts.ACTIVATIONS.built_in("gelu") and parts.ATTENTIONS.built_in("self_attention")
    registry: Registry[Any, NoFacts] = Registry("--kind", NoFacts)
    registry.register("prod", "math:prod")
    assert not registry.built_in("prod") and not registry.built_in("missing")


def test_a_part_named_by_text_is_imported_when_it_is_used() -> None:
    registry: Registry[Any, NoFacts] = Registry("--kind", NoFacts)
    registry.register("prod", "math:prod")
    registry.register("missing", "math:there_is_no_such_thing")
    assert registry["prod"]([2, 3]) == 6
    with pytest.raises(AttributeError):
        registry["missing"]


def test_a_name_that_is_taken_is_refused_with_both_places() -> None:
    registry: Registry[Any, NoFacts] = Registry("--kind", NoFacts)
    registry.register("a", 1)
    with pytest.raises(ValueError, match="--kind a is registered twice") as error:
        registry.register("a", 2)
    assert str(error.value).count(f"{__file__}:") == 2
    assert registry["a"] == 1


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    registry: Registry[Any, NoFacts] = Registry("--kind", NoFacts)
    registry.register("cosine", 1)
    with pytest.raises(ValueError, match="--kind cosin: must be one of cosine; nearest: cosine, or give the --ext"):
        registry["cosin"]
    with pytest.raises(ValueError, match="--kind x: the keywords of register\\(\\) are none, and gated given"):
        registry.register("x", 1, gated=True)


def test_a_part_must_have_the_form_of_its_kind() -> None:
    registry: Registry[Any, Facts] = Registry(
        "--kind", Facts, lambda facts: "a, b, c=" if facts.gated else "a", ("go",)
    )
    registry.register("text", "math:hypot")
    part: Any = type("Part", (), {"__init__": lambda self, a, b=0: None, "go": None})
    assert registry.register("fits", part) is part
    for wrong, gated, said in (
        (part, True, r"must take \(a, b, c=\), and takes \(a, b=0\); correct its parameters"),
        (7, False, "has no go"),
    ):
        with pytest.raises(ValueError, match=f"--kind wrong: {said}"):
            registry.register("wrong", wrong, gated=gated)
    assert "wrong" not in registry
    with pytest.raises(ValueError, match="--kind text: has no go"):
        registry["text"]
    for built_in in vars(parts).values():
        if isinstance(built_in, Registry):
            assert all(built_in[name] is not None for name in built_in)


def test_a_lazy_part_is_checked_when_it_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    forms: list[Facts] = []
    registry: Registry[Any, Facts] = Registry("--kind", Facts, lambda facts: forms.append(facts) or "x")
    registry.register("text", "math:sin")
    assert [registry["text"](0), registry["text"](0), len(forms)] == [0, 0, 1]
    monkeypatch.setattr("math.sin", lambda: 1)
    with pytest.raises(ValueError, match=r"--kind text: must take \(x\), and takes \(\)"):
        registry["text"]


def test_a_substitute_is_built_where_it_suits() -> None:
    registry: Registry[Any, NoFacts] = Registry("--kind", NoFacts)
    registry.register("root", "math:sqrt")
    registry.substitute("root", "math:isqrt", when=lambda x: isinstance(x, int))
    assert (registry.build("root", 6.25), registry.build("root", 17)) == (2.5, 4)
    assert registry["root"](16) == 4.0, "the name still stands for the part itself"


def test_an_attention_of_an_extension_says_what_its_parameters_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts.ATTENTIONS, "_entries", dict(parts.ATTENTIONS._entries))
    own = replace(GPT, attention_module="own")
    for listed in (None, f"{__name__}:own_metas"):
        parts.ATTENTIONS._entries.pop("own", None)
        parts.ATTENTIONS.register("own", lambda name, config, ctx: None, parameters=listed)
        assert is_declared(own) == (listed is not None) and extension_parts(own) == ["--attention-module own"]
    assert "decoder.layers.1.self_attention.scale" in [meta.name for meta in parameter_metas(own)]


def test_a_part_counts_by_what_it_lists_wherever_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm with a parameter of its own, moved among the built-in extensions, must not be counted as an RMSNorm."""
    for registry in (parts.NORMALIZATIONS, parts.ROUTERS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    library: dict[str, Any] = {"__name__": "megatron.extensions.own.flags", "parts": parts, "Norm": ScaledNorm}
    exec("parts.NORMALIZATIONS.register('own', Norm)", library)
    own = replace(GPT, normalization="own")
    norms, width = 2 * own.num_layers + 1, own.hidden_size
    assert parts.NORMALIZATIONS.built_in("own") and not is_declared(own)
    assert extension_parts(own) == ["--normalization own"]
    assert count_parameters(own).norms == count_parameters(replace(GPT, normalization="RMSNorm")).norms + norms * width

    parts.NORMALIZATIONS._entries.pop("own")
    parts.NORMALIZATIONS.register("own", ScaledNorm, parameters=f"{__name__}:scaled_norm_metas")
    assert is_declared(own) and built_metas(own, whole_model(own), False, ()) == stage_metas(own)

    exec("parts.ROUTERS.register('own', lambda name, config, ctx: None)", library)
    experts = replace(GPT, num_experts=4, moe_router_topk=2)
    assert is_declared(GPT) and not is_declared(experts), "of the routers, those of layers with experts count"


def test_parameters_that_are_not_those_listed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts.NORMALIZATIONS, "_entries", dict(parts.NORMALIZATIONS._entries))
    listed = parts.NORMALIZATIONS.facts("RMSNorm").parameters
    parts.NORMALIZATIONS.register("wrongly listed", ScaledNorm, parameters=listed)
    own = replace(GPT, normalization="wrongly listed")
    stage = whole_model(own)
    model = GPTModel(own, device="meta", initialize=False)
    with pytest.raises(ValueError, match=r"layernorm.scale: the model has .* with shape \[.*, and its part"):
        check_declared(model.parameters(), own, stage)
    biased = replace(GPT, num_experts=4, moe_router_topk=2, moe_router_enable_expert_bias=True)
    for right in (GPT, biased):  # the bias of a router is not trained
        check_declared(GPTModel(right, device="meta", initialize=False).parameters(), right, whole_model(right))


class ScaledNorm(nn.Module):
    """An RMSNorm with a second parameter."""

    def __init__(
        self, name: str, size: int, config: TransformerConfig, ctx: TPContext, partial_over: tuple[str, ...]
    ) -> None:
        super().__init__()
        metas = scaled_norm_metas(name, size, partial_over, config)
        self.weight, self.scale = (make_parameter(meta, ctx) for meta in metas)


def scaled_norm_metas(
    name: str, size: int, partial_over: tuple[str, ...], config: TransformerConfig
) -> list[ParamMeta]:
    return [ParamMeta(f"{name}.{key}", (size,), {}, Init("ones"), partial_over) for key in ("weight", "scale")]


def own_metas(name: str, config: TransformerConfig, sequence_parallel: bool) -> Iterator[ParamMeta]:
    yield ParamMeta(f"{name}.scale", (config.hidden_size,))
