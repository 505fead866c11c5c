"""The table of results, as lm-evaluation-harness prints it, and their record. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.extensions.evaluation.suite import TaskScore

HEAD = ("Tasks", "Version", "Filter", "n-shot", "Metric", "", "Value", "", "Stderr")
LEFT = {0, 2, 4}
"""Columns of text."""


def table(scores: Sequence[TaskScore]) -> str:
    """A table in Markdown."""
    rows = [list(HEAD)]
    for score in scores:
        shots = "" if score.num_fewshot is None else str(score.num_fewshot)
        arrow = "↑" if score.higher_is_better else "↓"
        error = "N/A" if score.error is None else f"{score.error:.4f}"
        name = score.task, score.version, score.filter, shots, score.metric
        rows.append([*name, arrow, f"{score.value:.4f}", "±", error])
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = ["|" + "|".join(_cell(row, column, widths) for column in range(len(HEAD))) + "|" for row in rows]
    rules = ["-" * (width - 1) + ("-" if column in LEFT or width < 2 else ":") for column, width in enumerate(widths)]
    rule = "|" + "|".join(rules) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _cell(row: Sequence[str], column: int, widths: Sequence[int]) -> str:
    return row[column].ljust(widths[column]) if column in LEFT else row[column].rjust(widths[column])


def record_of(scores: Sequence[TaskScore]) -> dict[str, Any]:
    """Values and standard errors by their names in records."""
    record: dict[str, Any] = {}
    for score in scores:
        record[score.key] = score.value
        if score.error is not None:
            name, comma, filter_name = score.key.partition(",")
            record[f"{name}_stderr{comma}{filter_name}"] = score.error
    return record
