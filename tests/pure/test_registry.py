"""Registries: names, lazy parts, facts, and errors that say where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from megatron.core.registry import NoFacts, Registry


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
