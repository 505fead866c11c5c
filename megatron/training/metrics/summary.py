"""Record of a log interval: loss, gradient norm, throughput, MFU, and the values that meters report."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron.core.collectives import all_reduce_
from megatron.core.tensor_parallel.linear_formats import LINEAR_FORMATS, linear_format
from megatron.training.config.run_config import LoggingConfig, RunConfig
from megatron.training.metrics.sinks import Record
from megatron.training.run import TrainingRun
from megatron.training.step_guard import is_nan

PEAK_TFLOPS_16BIT = {
    "A100": 312.0,
    "A800": 312.0,
    "H100": 989.4,
    "H200": 989.4,
    "H800": 989.4,
    "GH200": 989.4,
    "B200": 2250.0,
    "L40S": 362.05,
    "RTX A6000": 154.8,
    "GeForce RTX 3090": 71.0,
    "GeForce RTX 4090": 165.2,
    "GeForce RTX 5090": 209.5,
    "MI300X": 1307.4,
}
"""Peak TFLOP/s of dense matrix multiplication with fp32 accumulation, by device model, from the vendors' data
sheets."""

OTHER_MODELS = r"(?! (?:Ti|D|SUPER|Laptop)\b)"
"""Regular expression that must match after a model name from the table. Device names that continue with a word such as
"Ti" do not match, because they denote different models."""


def summarize(run: TrainingRun) -> Record:
    """Return the record of the current interval, equal on every rank. Collective: a single reduction makes all values
    global. This function waits for the device."""
    device, interval = run.runtime.device, run.interval
    losses = torch.stack([*interval.losses, torch.zeros(2, dtype=torch.float64, device=device)]).flatten()
    taken = [(meter, sums) for meter in run.meters if (sums := meter.take()) is not None]
    # Only the first rank counts FLOPs, because the first count can take seconds.
    flops = flops_per_token(run) if run.runtime.launch.rank == 0 else 0.0
    parts = [losses, losses.new_full((1,), flops), *(sums for _, sums in taken)]
    summed = all_reduce_(torch.cat(parts), run.runtime.state.world).split([part.numel() for part in parts])
    record = _of_steps(run, summed[0].view(-1, 2)[:-1], summed[1].item())
    for (meter, _), sums in zip(taken, summed[2:], strict=True):
        own = meter.report(sums, interval)
        if clash := sorted(record.keys() & own.keys()):
            raise ValueError(
                f"metric {clash[0]}: every record has a value of this name; register it under another name"
            )
        record |= own
    return record


def _of_steps(run: TrainingRun, losses: Tensor, flops: float) -> Record:
    """Return the entries of a record that every run logs, such as the loss and the throughput.

    Each row of `losses` [steps, 2] contains the loss sum and the number of tokens of a step over all ranks. `flops` is
    the model's number of FLOPs per token.
    """
    config = run.config
    interval = run.interval
    progress = run.progress
    results, steps = interval.results, len(interval.results)
    total, tokens = losses[[not result.skipped for result in results]].sum(dim=0).tolist()
    seconds = interval.seconds()
    tokens_per_second = interval.samples * config.model.seq_length / seconds
    samples_left = run.batch_sizes.samples(run.train_iters) - progress.consumed_samples
    return {
        "iteration": progress.iteration,
        "consumed_samples": progress.consumed_samples,
        "consumed_tokens": run.plan.tokens(progress.consumed_samples),
        "lm_loss": total / tokens if tokens else None,
        "grad_norm": results[-1].grad_norm if steps else None,
        "learning_rate": interval.learning_rate,
        **({} if interval.decoupled_lr is None else {"decoupled_learning_rate": interval.decoupled_lr}),
        "global_batch_size": interval.batch_size,
        "loss_scale": results[-1].loss_scale if steps else run.optimizer.loss_scale,
        "skipped_iterations": sum(result.skipped for result in results) + interval.passed_over,
        "nan_iterations": sum(map(is_nan, results)),
        "spike_iterations": sum(result.spike for result in results),
        "tokens_per_second": tokens_per_second,
        **utilization(config, run.runtime.device, tokens_per_second * flops / run.runtime.launch.world_size / 1e12),
        "step_time": seconds / max(steps, 1),
        "seconds_left": samples_left * config.model.seq_length / tokens_per_second if tokens_per_second else None,
    }


def flops_per_token(run: TrainingRun) -> float:
    """Return model FLOPs per token from the last callback that counts them, or 0 if no callback counts FLOPs."""
    counts = [callback.flops_per_token(run.config.model) for callback in run.callbacks]
    return next((count for count in reversed(counts) if count is not None), 0.0)


def peak_tflops(
    config: LoggingConfig, device: torch.device, dtype: torch.dtype, linear: str | None = None
) -> float | None:
    """Return the peak TFLOP/s of one device, or None if it is unknown. The peak is the value of --peak-tflops if it is
    set. Otherwise, it is the data sheet's peak for the number format `linear` in `LINEAR_FORMATS`, or for 16-bit
    training if `linear` is None.
    """
    if config.peak_tflops is not None:
        return config.peak_tflops
    if device.type != "cuda" or dtype.itemsize != 2:
        return None
    peaks = PEAK_TFLOPS_16BIT if linear is None else LINEAR_FORMATS.facts(linear).peak_tflops
    return peak_of_model(torch.cuda.get_device_name(device), peaks)


def peak_of_model(name: str, peaks: Mapping[str, float]) -> float | None:
    """Return the peak in TFLOP/s of the device that torch calls `name`, or None if `peaks` does not contain the device.
    `peaks` is a dict from device models to TFLOP/s."""
    return next((peak for model, peak in peaks.items() if re.search(rf"\b{model}\b{OTHER_MODELS}", name)), None)


def utilization(config: RunConfig, device: torch.device, tflops: float) -> Record:
    """Return the record entries for TFLOP/s per device and MFU. The record is empty if FLOPs are not counted."""
    if not tflops:
        return {}
    dtype = getattr(torch, config.parallel.params_dtype)
    peak = peak_tflops(config.logging, device, dtype, linear_format(config.parallel))
    return {"tflops_per_device": tflops, "mfu": tflops / peak if peak else None}
