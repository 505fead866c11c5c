"""tools/compare_megatron_flags.py reports new flags in the parser of a Megatron-LM checkout."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron.extensions.interop.megatron_flags.head_flags import TABLE, read_table, table_text
from tools import compare_megatron_flags

ARGUMENTS = """
import argparse
from enum import Enum

from absent_engine.pytorch import Layer
from megatron.core.parts import SIZES

class Backend(Enum):
    flash = 1
    sparkling = 2

class Own(Layer): ...

def add_megatron_arguments(parser):
    parser.add_argument("--num-layers", type=int, default=SIZES[0])
    parser.add_argument("--attention-backend", type=Backend, choices=list(Backend), default=Backend.flash)
    parser.add_argument("--use-flash-attn", action="store_true")
    parser.add_argument("--onnx-safe", type=bool)
    parser.add_argument("--glitter", "--shine", nargs="+", type=float)
    parser.add_argument("--disable-msc", action=argparse.BooleanOptionalAction, default=True)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "Megatron-LM"
    for path in ("megatron/training", "megatron/core"):
        (folder / path).mkdir(parents=True)
        (folder / path / "__init__.py").touch()
    (folder / "megatron/core/parts.py").write_text("SIZES = [None]")
    (folder / "megatron/training/arguments.py").write_text(ARGUMENTS)
    return folder


def test_new_flags_of_a_checkout_are_listed(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The comparison works even if modules are missing from the Megatron-LM checkout. New and changed flags are listed
    with their treatment."""
    assert compare_megatron_flags.main([str(checkout)]) == 1
    out = capsys.readouterr().out
    new, _, rest = out.partition("\nGone:")
    assert "  --glitter: unknown\n  --shine: unknown" in new and "--num-layers" not in new
    assert "\n  --hidden-size" in rest.partition("\nChanged:")[0]
    assert "--attention-backend: choices was flash fused unfused local auto, is flash sparkling" in rest
    assert "Unknown choices:\n  --attention-backend sparkling" in rest
    assert "8 spellings: " in rest and "1 refused" in rest


def test_the_table_is_written_for_one_branch(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = shutil.copyfile(TABLE, tmp_path / "table.txt")
    monkeypatch.setattr(compare_megatron_flags, "TABLE", table)
    compare_megatron_flags.main([str(checkout), "--branch", "dev", "--write", "Megatron-LM of tomorrow"])
    before, after = read_table(), read_table(table)
    assert table.read_text().splitlines()[1] == "# dev: Megatron-LM of tomorrow"
    of_main, still = ({row.flag for row in rows if "main" in row.branches} for rows in (before, after))
    assert of_main == still
    found = {row.flag.name: row.treatment for row in after if "dev" in row.branches.split()}
    assert len(found) == 8 and found["--glitter"] == "unknown" and found["--use-flash-attn"] == "no effect"


def test_the_table_is_up_to_date() -> None:
    rows = read_table()
    parsers = {name: [row.flag for row in rows if name in row.branches.split()] for name in ("main", "dev")}
    sources = [line[2:] for line in TABLE.read_text(encoding="utf-8").splitlines()[:2]]
    assert table_text(parsers, sources) == TABLE.read_text(encoding="utf-8")


def test_a_folder_that_is_not_a_checkout_is_refused(checkout: Path) -> None:
    with pytest.raises(ValueError, match="give the folder of a checkout"):
        compare_megatron_flags.main([str(checkout / "megatron")])
    (checkout / "megatron/training/arguments.py").write_text("import megatron.core.gone")
    with pytest.raises(ValueError, match=r"cannot be built: .*No module named 'megatron\.core\.gone'"):
        compare_megatron_flags.main([str(checkout)])
