"""Console lines in Megatron-LM's format, for programs that parse its logs (--log-format megatron). No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import datetime

from megatron.extensions.logs.flags import LogsConfig
from megatron.training.hooks import RunView
from megatron.training.metrics.console import LogLines, mtp_losses
from megatron.training.metrics.sinks import Record


class MegatronLines(LogLines):
    """Lines with the words and numbers that parsers of Megatron-LM's logs look for."""

    def start(self, run: RunView) -> Iterator[str]:
        count = sum(parameter.numel() for stage in run.stages.values() for parameter in stage.parameters())
        yield f" > number of parameters on (tensor, pipeline) model parallel rank (0, 0): {count}"

    def progress(self, record: Record) -> str:
        return progress_line(record, self.train_iters, self.config.options(LogsConfig).log_throughput)

    def evaluation(self, iteration: int, split: str, name: str, loss: float) -> Iterator[str]:
        """The lines of a validation during the training name no split; at its end there are those of "valid" too."""
        training = self.config.training
        if split == "test":
            yield evaluation_lines("test", iteration, loss, name)
            return
        if iteration % training.eval_interval == 0 and not training.skip_train:
            yield evaluation_lines("", iteration, loss, name)
        if iteration == self.train_iters or training.skip_train:
            yield evaluation_lines("valid", iteration, loss, name)

    def saving(self, iteration: int, stalled: float) -> str:
        return f"saving checkpoint at iteration {iteration:7d} to {self.config.checkpoint.save} in torch_dist format"

    def saved(self, iteration: int, seconds: float) -> str:
        return f"  successfully saved checkpoint from iteration {iteration:7d} to {self.config.checkpoint.save}"


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
