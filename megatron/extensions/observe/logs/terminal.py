"""Log lines for a terminal, with at most two rows per log interval. This module does not import torch."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from megatron.training.metrics.console import LogLines, parts_by_weight
from megatron.training.metrics.sinks import Record

ROWS = 2
"""Maximum number of terminal rows per interval."""


class TerminalLines(LogLines):
    """Log format that fits each line to the width of the terminal."""

    def progress(self, record: Record) -> str:
        width = shutil.get_terminal_size().columns
        return terminal_lines(record, self.train_iters, width, self.metrics)


def terminal_lines(record: Record, train_iters: int, width: int, metrics: Sequence[str] = ()) -> str:
    """Format a record as at most two terminal rows. Errors in the log interval come first, followed by the other values
    in order of importance.

    Values that do not fit are omitted; `metrics.jsonl` contains all values.

    Args:
        record: The record.
        train_iters: Length of the run in iterations.
        width: Width of the terminal in characters.
        metrics: Names of additional metrics.
    """
    kept: list[str] = []
    for part in parts_by_weight(record, train_iters, metrics):
        if _fits([*kept, part], width):
            kept.append(part)
    return "\n".join(_rows(kept, width))


def _fits(parts: list[str], width: int) -> bool:
    rows = _rows(parts, width)
    return len(rows) <= ROWS and all(len(row) <= width for row in rows)


def _rows(parts: list[str], width: int) -> list[str]:
    """Distribute the parts of a line over rows. Each row contains as many parts as fit into `width` characters."""
    rows: list[str] = []
    for part in parts:
        longer = f"{rows[-1]} | {part}" if rows else f" {part}"
        if rows and len(longer) > width:
            rows.append(f"   {part}")
        else:
            rows[-1:] = [longer]
    return rows
