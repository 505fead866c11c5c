"""Reader of `named.txt`, which contains lines of the form `NAME: COMBINATION`. Some combinations are taken from
published reports of silently wrong gradients (docs/layouts.md). The other combinations are error-prone for different
reasons."""

from __future__ import annotations

from pathlib import Path

from tests.parity.matrix.combination import Combination

LINES = (line.split(": ") for line in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines())
NAMED = {name: combination for name, line in LINES if (combination := Combination.read(line)).is_there}
