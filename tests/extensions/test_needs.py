"""The `needs` entries of built-in extensions match the imports between the extensions' modules."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from megatron import extensions
from megatron.extensions import BUILT_IN, BuiltIn

NEEDS = {extension.name: set(extension.needs) for extension in BUILT_IN}
PLACES = {extension.name: extension.place for extension in BUILT_IN}


def imported(path: Path) -> set[str]:
    """Return the extensions that a module imports, including imports within functions."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        extensions_of = (re.match(r"megatron\.extensions\.\w+\.(\w+)", module) for module in modules)
        found |= {match[1] for match in extensions_of if match}
    return found & NEEDS.keys()


@pytest.mark.parametrize("name", NEEDS)
def test_needs_match_the_imports(name: str) -> None:
    modules = list(Path(extensions.__path__[0], PLACES[name]).rglob("*.py"))
    assert modules
    assert set().union(*map(imported, modules)) - {name} == NEEDS[name]


def test_needs_have_no_cycle() -> None:
    assert set(TopologicalSorter(NEEDS).static_order()) == set(NEEDS)


LISTS = [
    ([BuiltIn("plan/planner", "plans", needs=("simulator",))], "planner, which needs simulator: remove the line"),
    ([BuiltIn("use/gone", "nothing")], 'gone, which is missing: remove the line BuiltIn("use/gone", ...) there'),
]


@pytest.mark.parametrize(("listed", "said"), LISTS)
def test_an_inconsistent_list_is_refused(listed: list[BuiltIn], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "BUILT_IN", listed)
    with pytest.raises(ModuleNotFoundError, match=re.escape(said)):
        extensions.load.__wrapped__()
