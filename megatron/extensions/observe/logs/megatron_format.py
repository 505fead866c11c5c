"""Megatron-LM's tags for TensorBoard and Weights & Biases, and its console lines (--log-format megatron).

These formats are for dashboards and programs that were written for Megatron-LM. This module does not import torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from megatron.core.config.losses import has_perplexity
from megatron.extensions.observe.logs.flags import LogsConfig
from megatron.training.hooks import RunView
from megatron.training.metrics.console import LogLines, mtp_losses
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
"""Maps the name of a value in metric records to Megatron-LM's tag."""

OVER_SAMPLES = ("lm loss", "learning-rate", "batch-size", "loss-scale", "grad-norm", "num-zeros", "params-norm")
"""Tags that have an additional curve over consumed samples, named "TAG vs samples". Evaluation losses also have this
curve, although their tags are not listed here."""


def scalars(record: Record) -> Iterator[tuple[str, float, int]]:
    """Yield a tuple (tag, value, step) for each number in a record. Values that Megatron-LM does not log keep the names
    that this program gives them. A value in a table is named TABLE/COLUMN/ROW.
    """
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
    """Yield a tuple (COLUMN/ROW, value) for each value in a table of a record. A table maps column names to lists of
    equal length. The first column contains the row numbers. If an entry of a column is itself a list, the maximum of
    this list is yielded. Null entries are skipped. If the mapping is not a table, nothing is yielded.
    """
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
    """Return Megatron-LM's tag for a value in metric records: "valid_loss" becomes "lm loss validation"."""
    if found := re.fullmatch(r"source_(.+)_loss", key):
        return f"lm loss source {found[1]}"
    if found := re.fullmatch(r"(valid|test)(?:_(.+))?_(loss|perplexity)", key):
        split, name, kind = found.groups()
        parts = ["lm loss", "validation" if split == "valid" else split, name, "ppl" if kind == "perplexity" else None]
        return " ".join(part for part in parts if part)
    if found := re.fullmatch(r"mtp_loss_(\d+)", key):
        return f"mtp_{found[1]} loss"
    return TAGS.get(key, key)


class MegatronLines(LogLines):
    """Log format that parsers of Megatron-LM's logs can read."""

    def start(self, run: RunView) -> Iterator[str]:
        count = sum(parameter.numel() for stage in run.stages.values() for parameter in stage.parameters())
        yield f" > number of parameters on (tensor, pipeline) model parallel rank (0, 0): {count}"

    def progress(self, record: Record) -> str:
        return progress_line(record, self.train_iters, self.config.options(LogsConfig).log_throughput)

    def evaluation(self, iteration: int, split: str, name: str, loss: float) -> Iterator[str]:
        """Yield the log lines of an evaluation.

        The lines of a validation during training do not contain the name of the split. The last validation of a run
        also yields lines that contain the name "valid".

        Args:
            iteration: Iteration of the evaluation.
            split: "valid" or "test".
            name: Name of the validation set if there are several; otherwise empty.
            loss: Mean loss, in nats if it is a cross-entropy.
        """
        training, model = self.config.training, self.config.model
        shows = has_perplexity(model.loss_func, model.z_loss_coeff)
        if split == "test":
            yield evaluation_lines("test", iteration, loss, name, shows)
            return
        if iteration % training.eval_interval == 0 and not training.skip_train:
            yield evaluation_lines("", iteration, loss, name, shows)
        if iteration == self.train_iters or training.skip_train:
            yield evaluation_lines("valid", iteration, loss, name, shows)

    def saving(self, iteration: int, stalled: float) -> str:
        return f"saving checkpoint at iteration {iteration:7d} to {self.config.checkpoint.save} in torch_dist format"

    def saved(self, iteration: int, seconds: float) -> str:
        return f"  successfully saved checkpoint from iteration {iteration:7d} to {self.config.checkpoint.save}"


def progress_line(record: Record, train_iters: int, throughput: bool, now: datetime | None = None) -> str:
    """Return the progress line of a log interval. The loss is omitted if it is not positive, as in an interval without
    updates."""
    parts = [
        f"iteration {record['iteration']:8d}/{train_iters:8d}",
        f"consumed samples: {record['consumed_samples']:12d}",
        f"elapsed time per iteration (ms): {1e3 * record['step_time']:.1f}",
    ]
    if throughput and "tflops_per_device" in record:
        parts.append(f"throughput per GPU (TFLOP/s/GPU): {record['tflops_per_device']:.1f}")
    parts += [f"learning rate: {record['learning_rate']:.6E}", f"global batch size: {record['global_batch_size']:5d}"]
    loss = record["lm_loss"]
    if loss is not None and loss > 0:
        parts.append(f"lm loss: {loss:.6E}")
    if "moe_aux_loss" in record and record["moe_aux_loss"] > 0:
        parts.append(f"load_balancing_loss: {record['moe_aux_loss']:.6E}")
    for key, value in mtp_losses(record):
        if value > 0:
            parts.append(f"mtp_{key.removeprefix('mtp_loss_')} loss: {value:.6E}")
    parts.append(f"loss scale: {record['loss_scale']:.1f}")
    if record["grad_norm"] is not None:
        parts.append(f"grad norm: {record['grad_norm']:.3f}")
    if "num_zeros" in record:
        parts.append(f"num zeros: {record['num_zeros']:.1f}")
    if "params_norm" in record:
        parts.append(f"params norm: {record['params_norm']:.3f}")
    parts.append(f"number of skipped iterations: {record['skipped_iterations']:3d}")
    parts.append(f"number of nan iterations: {record['nan_iterations']:3d}")
    return f" [{(now or datetime.now()):%Y-%m-%d %H:%M:%S}] " + " | ".join(parts) + " |"


def evaluation_lines(split: str, iteration: int, loss: float, name: str = "", shows_perplexity: bool = True) -> str:
    """Return the lines of an evaluation: one line with the loss, enclosed by two ruler lines.

    Args:
        split: "test", "valid", or "" for a validation during training, for which the line does not name a split.
        iteration: Iteration of the evaluation.
        loss: Mean loss, in nats if it is a cross-entropy.
        name: Name of the validation set if there are several; otherwise empty.
        shows_perplexity: True if exp(loss) is the perplexity.
    """
    where = f"iteration {iteration}" + {"test": " on test set", "valid": " on validation set", "": ""}[split]
    where += f" on {name}" if name else ""
    shown = f"lm loss PPL: {perplexity(loss):.6E} | " if shows_perplexity else ""
    line = f" validation loss at {where} | lm loss value: {loss:.6E} | {shown}"
    ruler = "-" * (len(line) + 1)
    return f"{ruler}\n{line}\n{ruler}"


def perplexity(loss: float) -> float:
    """Return exp(loss). As in Megatron-LM, losses above 20 are treated as 20."""
    return math.exp(min(20.0, loss))
