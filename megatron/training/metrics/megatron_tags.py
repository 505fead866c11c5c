"""Megatron-LM's tags of TensorBoard and Weights & Biases, for dashboards that are made for them. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from megatron.extensions.diagnosis.layer_stats.records import layer_scalars

Record = dict[str, Any]

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
    """(tag, value, step) of each number of a record. What Megatron-LM does not log keeps our name; values of layers
    have the layer's number behind it."""
    for tag, value in layer_scalars(record.get("layers") or {}):
        yield tag, value, record["iteration"]
    for key, value in record.items():
        if key in ("iteration", "schema") or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        tag = tag_of(key)
        yield tag, value, record["iteration"]
        if "consumed_samples" in record and (tag in OVER_SAMPLES or tag.startswith("lm loss ")):
            yield f"{tag} vs samples", value, record["consumed_samples"]


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
