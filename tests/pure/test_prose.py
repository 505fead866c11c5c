"""Tests of the English prose: proselint checks the documentation pages, and the words in plain_words.toml must not
occur in pages, code and messages."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.apart import ROOT, python_apart

PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")), ROOT / "research/README.md"]
CODE = [
    *ROOT.glob("megatron/**/*.py"),
    *ROOT.glob("tools/**/*.py"),
    *ROOT.glob("research/*.py"),
    *ROOT.glob("scripts/**/*.sh"),
]
AVOIDED = tomllib.loads(Path(__file__).with_name("plain_words.toml").read_text())


def test_text_avoids_refused_words() -> None:
    found = []
    for path in [*PAGES, *CODE]:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for pattern, better in AVOIDED.items():
                if word := re.search(pattern, line, re.IGNORECASE):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {word[0]!r}: write {better}")
    assert not found, "\n".join(found)


def test_refused_words_are_detected() -> None:
    assert len(AVOIDED) > 15
    assert any(re.search(pattern, "In order to stop", re.IGNORECASE) for pattern in AVOIDED)


def test_pages_pass_proselint() -> None:
    pytest.importorskip("proselint")
    config = Path(__file__).with_name("proselint.json")
    python_apart("-m", "proselint", "check", "--config", str(config), *map(str, PAGES), code=0)
