"""Tests of how progress lines are formatted for a terminal."""

from __future__ import annotations

from megatron.extensions.observe.logs.terminal import terminal_lines
from tests.pure.test_log_format import RECORD


def test_an_interval_takes_at_most_two_terminal_rows() -> None:
    troubled = RECORD | {"skipped_iterations": 3, "nan_iterations": 1, "moe_load_min": 0.5, "moe_load_max": 1.5}
    troubled["moe_aux_loss"] = 1.0
    for width in (40, 60, 80, 120, 200):
        for record in (RECORD, troubled, RECORD | {"lm_loss": None, "grad_norm": None, "seconds_left": None}):
            rows = terminal_lines(record, 100, width).split("\n")
            assert len(rows) <= 2 and all(len(row) <= width for row in rows), rows
            assert rows[0].startswith(" 10/100 (10 %)")
    assert terminal_lines(RECORD, 100, 100) == (
        " 10/100 (10 %) | loss 3.2500 | gradient norm 1.5 | lr 0.00015 | 1:02:03 left | 1,234 tokens/s\n"
        "   step 123.5 ms | 12.3 TFLOP/s | 1.0 GiB | batch 8 | 1,280 tokens"
    )
    narrow = terminal_lines(troubled, 100, 40)
    assert "1 NaN" in narrow and "3 skipped" in narrow and "TFLOP" not in narrow  # problems come first
    assert "expert load 0.50-1.50" in terminal_lines(troubled, 100, 120)
