"""Megatron-LM's tags of TensorBoard and Weights & Biases, for dashboards that are made for them. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.training.metrics.sinks import Record

TAGS = {
    "lm_loss": "lm loss",
    "learning_rate": "learning-rate",
    "decoupled_learning_rate": "decoupled-learning-rate",
    "global_batch_size": "batch-size",
    "loss_scale": "loss-scale",
    "grad_norm": "grad-norm",
    "num_zeros": "num-zeros",
    "params_norm": "params-norm",
    "step_time": "iteration-time",
    "tflops_per_device": "throughput",
    "peak_memory_bytes": "mem-max-allocated-bytes",
    "moe_aux_loss": "load_balancing_loss",
}
"""Name in our records -> Megatron-LM's tag."""

OVER_SAMPLES = ("lm loss", "learning-rate", "batch-size", "loss-scale", "grad-norm", "num-zeros", "params-norm")
"""Tags that have a twin "... vs samples", drawn over the samples consumed. Those of evaluations have one too."""


def scalars(record: Record) -> Iterator[tuple[str, float, int]]:
    """(tag, value, step) of each number of a record. What Megatron-LM does not log keeps our name; values of a table
    have that of the table before it and the number of the row behind it."""
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}/{tag}", number, record["iteration"]) for tag, number in _of_table(value))
        if key in ("iteration", "schema") or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        tag = tag_of(key)
        yield tag, value, record["iteration"]
        if "consumed_samples" in record and (tag in OVER_SAMPLES or tag.startswith("lm loss ")):
            yield f"{tag} vs samples", value, record["consumed_samples"]


def _of_table(columns: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """(COLUMN/ROW, value) of a table in a record: lists of equal length, the first of which numbers the rows. Of values
    that are lists the largest is one; null is none. Nothing of any other mapping."""
    if not all(isinstance(values, list) for values in columns.values()):
        return
    first, *names = columns or [""]
    for name in names:
        for row, value in zip(columns[first], columns[name], strict=True):
            if isinstance(value, list):
                yield f"{name}_max/{row}", max(value)
            elif value is not None:
                yield f"{name}/{row}", value


def tag_of(key: str) -> str:
    """Megatron-LM's tag of a value of our records: "valid_loss" is "lm loss validation"."""
    if found := re.fullmatch(r"source_(.+)_loss", key):
        return f"lm loss source {found[1]}"
    if found := re.fullmatch(r"(valid|test)(?:_(.+))?_(loss|perplexity)", key):
        split, name, kind = found.groups()
        parts = ["lm loss", "validation" if split == "valid" else split, name, "ppl" if kind == "perplexity" else None]
        return " ".join(part for part in parts if part)
    if found := re.fullmatch(r"mtp_loss_(\d+)", key):
        return f"mtp_{found[1]} loss"
    return TAGS.get(key, key)
