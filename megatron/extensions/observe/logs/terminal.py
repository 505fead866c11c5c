"""The console's lines on a terminal: at most two rows for an interval. This module does not import torch."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from megatron.training.metrics.console import LogLines, parts_by_weight
from megatron.training.metrics.sinks import Record

ROWS = 2
"""Rows of a terminal that an interval may take."""


class TerminalLines(LogLines):
    """Lines as wide as the terminal."""

    def progress(self, record: Record) -> str:
        width = shutil.get_terminal_size().columns
        return terminal_lines(record, self.train_iters, width, self.metrics)


def terminal_lines(record: Record, train_iters: int, width: int, metrics: Sequence[str] = ()) -> str:
    """Fits into two rows of `width` characters of a terminal: what went wrong in the interval, then the rest by what is
    looked at most. The metrics file has every field."""
    kept: list[str] = []
    for part in parts_by_weight(record, train_iters, metrics):
        if _fits([*kept, part], width):
            kept.append(part)
    return "\n".join(_rows(kept, width))


def _fits(parts: list[str], width: int) -> bool:
    rows = _rows(parts, width)
    return len(rows) <= ROWS and all(len(row) <= width for row in rows)


def _rows(parts: list[str], width: int) -> list[str]:
    """Parts side by side, as many in a row as there is room for."""
    rows: list[str] = []
    for part in parts:
        longer = f"{rows[-1]} | {part}" if rows else f" {part}"
        if rows and len(longer) > width:
            rows.append(f"   {part}")
        else:
            rows[-1:] = [longer]
    return rows
