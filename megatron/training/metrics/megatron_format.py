"""Console lines in Megatron-LM's format, for programs that parse its logs (--log-format megatron). No torch."""

from __future__ import annotations

import math
from datetime import datetime

from megatron.training.metrics.sinks import Record


def progress_line(record: Record, train_iters: int, throughput: bool, now: datetime | None = None) -> str:
    """The line of a log interval. A loss that is not above 0, as that of an interval without updates, is left out."""
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
    for key, value in record.items():
        if key.startswith("mtp_loss_") and value is not None and value > 0:
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


def parameters_line(count: int) -> str:
    """The line of the number of parameters on the first rank of TP and PP."""
    return f" > number of parameters on (tensor, pipeline) model parallel rank (0, 0): {count}"


def save_line(iteration: int, folder: str | None) -> str:
    """The line of a save that begins."""
    return f"saving checkpoint at iteration {iteration:7d} to {folder} in torch_dist format"


def saved_line(iteration: int, folder: str | None) -> str:
    """The line of a save that has succeeded."""
    return f"  successfully saved checkpoint from iteration {iteration:7d} to {folder}"


def evaluation_lines(split: str, iteration: int, loss: float, name: str = "") -> str:
    """The three lines of an evaluation: the loss between two rulers. `split`: "test", "valid", or "" for that of a
    validation during the training, whose line names no split. `name`: of one validation set of several."""
    where = f"iteration {iteration}" + {"test": " on test set", "valid": " on validation set", "": ""}[split]
    where += f" on {name}" if name else ""
    line = f" validation loss at {where} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity(loss):.6E} | "
    ruler = "-" * (len(line) + 1)
    return f"{ruler}\n{line}\n{ruler}"


def perplexity(loss: float) -> float:
    """exp(loss), of a loss of at most 20 as Megatron-LM has it."""
    return math.exp(min(20.0, loss))
