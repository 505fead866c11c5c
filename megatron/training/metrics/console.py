"""Console lines of a run in this program's format. This module does not import torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import timedelta

from megatron.core.config.losses import has_perplexity
from megatron.core.config.model import TransformerConfig
from megatron.training.config.run_config import RunConfig
from megatron.training.hooks import RunView
from megatron.training.metrics.sinks import Record

MOST_SECONDS = 1e9
"""Largest duration to print, in seconds (about thirty years). Longer durations are capped."""


class LogLines:
    """Console lines of a run. Other formats derive from this class and are registered in `LOG_FORMATS`."""

    metrics: Sequence[str] = ()
    """Names of the metrics that callbacks and the program itself define."""

    place: str | None = None
    """Checkpoint folder, if it differs from --save."""

    def __init__(self, config: RunConfig, train_iters: int) -> None:
        self.config, self.train_iters = config, train_iters

    def start(self, run: RunView) -> Iterator[str]:
        """Yield the lines that are printed before the first step, after the description of the run."""
        yield from ()

    def progress(self, record: Record) -> str:
        """Return the console line for a log interval."""
        return progress_line(record, self.train_iters, self.metrics)

    def evaluation(self, iteration: int, split: str, name: str, loss: float) -> Iterator[str]:
        """Yield the console lines for an evaluation.

        Args:
            iteration: Iteration of the evaluation.
            split: "valid" or "test".
            name: Name of the validation set if there are several; otherwise empty.
            loss: Mean loss, in nats if it is a cross-entropy.
        """
        found = perplexity(loss, self.config.model)
        shown = "" if found is None else f" | perplexity: {found:.6E}"
        yield f" {f'{split} {name}'.strip()} after iteration {iteration} | loss: {loss:.6E}{shown}"

    def saving(self, iteration: int, stalled: float) -> str:
        """Return the line that reports that a save has started. Training was stalled for `stalled` seconds until the
        save had started."""
        return f" saving checkpoint at iteration {iteration}, stalled for {stalled:.2f} s"

    def saved(self, iteration: int, seconds: float) -> str:
        """Return the line that reports a successful save. `seconds` is the duration of the save."""
        folder = self.place or self.config.checkpoint.save
        return f" saved checkpoint at iteration {iteration} to {folder} in {seconds:.2f} s"


def perplexity(loss: float, model: TransformerConfig) -> float | None:
    """Return exp(mean loss), or None if the model's loss is not a plain cross-entropy."""
    if not has_perplexity(model.loss_func, model.z_loss_coeff):
        return None
    return math.exp(loss) if loss < 700 else math.inf


def mtp_losses(record: Record) -> list[tuple[str, float]]:
    """Return (key, loss) for each multi-token prediction depth that has a loss."""
    return [(key, loss) for key, loss in record.items() if key.startswith("mtp_loss_") and loss is not None]


def duration(seconds: float | None) -> str:
    """Format a duration as `0:02:05` or `3 days, 4:00:00`; None gives `unknown`."""
    return "unknown" if seconds is None else str(timedelta(seconds=round(min(seconds, MOST_SECONDS))))


def progress_line(record: Record, train_iters: int, metrics: Sequence[str] = ()) -> str:
    """Format a record as one line of a log file, with all digits of the loss. The line omits some fields of the record;
    the metrics file contains all fields."""
    _, loss, *others = parts_by_weight(record, train_iters, metrics)
    if record["lm_loss"] is not None:
        loss = f"lm loss: {record['lm_loss']:.6E}"
    return " " + " | ".join((f"iteration {record['iteration']:8d}/{train_iters:8d}", loss, *others))


def parts_by_weight(record: Record, train_iters: int, metrics: Sequence[str] = ()) -> list[str]:
    """Return the parts of a console line in this order: iteration, loss, counts of errors in the interval, other values
    by decreasing importance, and the metrics that `metrics` names."""
    loss = record["lm_loss"]
    norm = record["grad_norm"]
    mfu = record.get("mfu")
    share = 100 * record["iteration"] / train_iters
    share_of_peak = "" if mfu is None else f" ({100 * mfu:.3g} % MFU)"
    parts = [
        f"{record['iteration']:,}/{train_iters:,} ({share:.3g} %)",
        "every step was skipped" if loss is None else f"loss {loss:.4f}",
        *(f"{record[key]} {name}" for key, name in TROUBLES.items() if record[key]),
        *([f"gradient norm {norm:.3g}"] if norm is not None else []),
        f"lr {record['learning_rate']:.3g}",
        f"{duration(record['seconds_left'])} left",
        f"{record['tokens_per_second']:,.0f} tokens/s",
        f"step {record['step_time']:.3g} s" if record["step_time"] >= 1 else f"step {1e3 * record['step_time']:.1f} ms",
        *([f"{record['tflops_per_device']:.3g} TFLOP/s{share_of_peak}"] if "tflops_per_device" in record else []),
        f"{record['peak_memory_bytes'] / 2**30:.1f} GiB",
        f"batch {record['global_batch_size']:,}",
        f"{record['consumed_tokens']:,} tokens",
        *([f"loss scale {record['loss_scale']:.3g}"] if record["loss_scale"] != 1 else []),
        *(f"{key.replace('_', ' ')} {loss:.4f}" for key, loss in mtp_losses(record)),
        *(f"{key.replace('_', ' ')} {record[key]:.6g}" for key in ("params_norm", "num_zeros") if key in record),
    ]
    if "moe_load_max" in record:
        parts.append("expert load {moe_load_min:.2f}-{moe_load_max:.2f}".format(**record))
        parts.append(f"load balancing loss {record['moe_aux_loss']:.4f}")
    return parts + [f"{name} {record[name]:.4g}" for name in metrics if record.get(name) is not None]


TROUBLES = {"nan_iterations": "NaN", "skipped_iterations": "skipped", "spike_iterations": "spikes"}
"""Counts that a console line shows only if they are nonzero: the key of each count in the record, and the label of the
count."""
