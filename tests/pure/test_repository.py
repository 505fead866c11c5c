"""Test that the files for contributors (workflows, hooks and templates) match the tree."""

from __future__ import annotations

import re
from importlib import import_module

import yaml

from tests.apart import ROOT


def read_yaml(path: str) -> dict[str, object]:
    return yaml.safe_load((ROOT / path).read_text())


def test_the_workflow_runs_the_checks() -> None:
    job = read_yaml(".github/workflows/checks.yml")["jobs"]["checks"]
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run"]
    versions = [step["with"]["python-version"] for step in job["steps"] if "setup-python" in step.get("uses", "")]
    least = re.search(r'requires-python = ">=(.+)"', (ROOT / "pyproject.toml").read_text())
    assert least is not None and versions == [least[1]]


def test_hooks_run_the_checks_without_the_tests() -> None:
    (repository,) = read_yaml(".pre-commit-config.yaml")["repos"]
    checks = re.findall(r'^ *check "?([\w -]+?)"? "', (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert [hook["name"] for hook in repository["hooks"]] == checks and len(checks) == 4
    script = (ROOT / ".ci/run").read_text().replace('"$PYTHON" ', "")
    for hook in repository["hooks"]:
        words = hook["entry"].removeprefix(".venv/bin/").removeprefix("python ")
        assert re.search(rf'check .*[ /"]{re.escape(words)}"?$', script, re.MULTILINE), hook["id"]


def test_templates_name_what_exists() -> None:
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        if path.name == "config.yml":
            continue
        form = yaml.safe_load(path.read_text())
        assert form["name"] and form["description"] and form["body"], path
        for item in form["body"]:
            assert item["type"] in ("textarea", "checkboxes", "input", "dropdown", "markdown"), path
            assert item["attributes"]["label"], path
    texts = [path.read_text() for path in (ROOT / ".github").rglob("*.*")]
    named = [name for text in texts for name in re.findall(r"\b(?:docs|scripts|tests|tools)/[\w/]+\.\w+", text)]
    assert named and [name for name in named if not (ROOT / name).exists()] == []


def test_placeholders_are_marked() -> None:
    for path in (".github/CODEOWNERS", "CITATION.cff"):
        assert "# Placeholder: " in (ROOT / path).read_text()
    assert "names no private address for reports yet" in (ROOT / "SECURITY.md").read_text()


def test_suggested_first_changes_name_existing_files() -> None:
    text = (ROOT / "docs/first_changes.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 6
    named = [name for row in rows for name in re.findall(r"`((?:tools|megatron|scripts|tests)/[\w/.]+)`", row)]
    assert len(named) > len(rows) and [name for name in named if not (ROOT / name).exists()] == []


def test_proofs_name_existing_tests_and_programs() -> None:
    text = (ROOT / "docs/proof.md").read_text()
    tests = [word for command in re.findall(r"`pytest ([^`]+)`", text) for word in command.split() if "/" in word]
    programs = [f"{name.replace('.', '/')}" for name in re.findall(r"`python -m ([\w.]+)", text)]
    programs = [name if (ROOT / name).is_dir() else f"{name}.py" for name in programs]
    tools = re.findall(r"`python (\S+\.py)", text)
    assert len(tests) > 12 and len(programs) > 4 and tools
    assert [name for name in (*tests, *programs, *tools) if not (ROOT / name).exists()] == []


def test_the_reference_names_what_can_be_imported() -> None:
    names = re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    assert len(names) > 12
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert getattr(import_module(module), attribute).__doc__, name
