"""What a run reports: one record per log interval, to a JSON-lines file, TensorBoard and Weights & Biases.

Throughput is tokens per second first; TFLOP/s and MFU count model FLOPs with causal attention (half of the
s x s square), see `megatron.core.model_math`.
"""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import sys
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron.training.config.run_config import LoggingConfig

# Dense tensor-core peaks in TFLOP/s, from the vendor's data sheets.
PEAK_TFLOPS_16BIT = {"A100": 312.0, "H100": 989.4, "H200": 989.4, "H800": 989.4, "A800": 312.0}
PEAK_TFLOPS_FP8 = {"H100": 1978.9, "H200": 1978.9, "H800": 1978.9}

Record = dict[str, Any]


def peak_tflops(config: LoggingConfig, device: torch.device, dtype: torch.dtype, fp8: bool = False) -> float | None:
    """Peak of one device in TFLOP/s: what the user says, else known from its name for 16-bit or fp8, else None."""
    if config.peak_tflops is not None:
        return config.peak_tflops
    if device.type != "cuda" or dtype.itemsize != 2:
        return None
    name = torch.cuda.get_device_name(device)
    peaks = PEAK_TFLOPS_FP8 if fp8 else PEAK_TFLOPS_16BIT
    return next((peak for key, peak in peaks.items() if key in name), None)


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held so far: of the CUDA allocator, or of the process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


class Sink(Protocol):
    """Somewhere that records go."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class JsonLinesSink:
    """One JSON object a line. A resumed run continues the file: records past its starting point are dropped,
    so that the file reads as if the run had never stopped. A run that starts anew keeps what lies there under
    another name. What cannot be written, as the disk is full, is said once and written with a later record."""

    def __init__(self, path: Path, resume_iteration: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            if resume_iteration:
                self._truncate(path, resume_iteration)
            else:
                os.replace(path, self._free_name(path))
        self._file = path.open("ab", buffering=0)
        self._end = path.stat().st_size
        self._unwritten = b""
        self._failing = False

    @staticmethod
    def _free_name(path: Path) -> Path:
        """metrics.1.jsonl, or the first number that is not taken."""
        names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
        return next(name for name in names if not name.exists())

    @staticmethod
    def _truncate(path: Path, iteration: int) -> None:
        kept = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                if json.loads(line)["iteration"] <= iteration:
                    kept.append(line + "\n")
            except (json.JSONDecodeError, KeyError, TypeError):
                continue  # damaged, or the last line of a run that was killed while writing it
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, path)

    def write(self, record: Record) -> None:
        # JSON has no NaN or infinity.
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._unwritten += (json.dumps(finite) + "\n").encode()
        try:
            if self._file.write(self._unwritten) < len(self._unwritten):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._file.truncate(self._end)  # no part of a line stays
            if not self._failing:
                print(f"metrics cannot be written to {self._file.name} for now: {error}", file=sys.stderr, flush=True)
            self._failing = True
            return
        self._end += len(self._unwritten)
        self._unwritten, self._failing = b"", False

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Scalars under the record's keys, by iteration."""

    def __init__(self, folder: str, resume_iteration: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(folder, purge_step=resume_iteration + 1)

    def write(self, record: Record) -> None:
        for key, value in record.items():
            if key != "iteration" and isinstance(value, int | float):
                self._writer.add_scalar(key, value, record["iteration"])

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases, where the package is installed."""

    def __init__(self, config: LoggingConfig, run_config: Record) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError(
                f"--wandb-project {config.wandb_project} needs the wandb package: pip install wandb"
            ) from error
        self._run = wandb.init(project=config.wandb_project, name=config.wandb_exp_name, config=run_config)

    def write(self, record: Record) -> None:
        self._run.log(record, step=record["iteration"])

    def close(self) -> None:
        self._run.finish()


def open_sinks(config: LoggingConfig, save: str | None, resume_iteration: int, run_config: Record) -> list[Sink]:
    """The sinks that the configuration asks for; to be called on one rank."""
    sinks: list[Sink] = []
    path = config.metrics_file or (str(Path(save) / "metrics.jsonl") if save else "metrics.jsonl")
    sinks.append(JsonLinesSink(Path(path), resume_iteration))
    if config.tensorboard_dir:
        sinks.append(TensorBoardSink(config.tensorboard_dir, resume_iteration))
    if config.wandb_project:
        sinks.append(WandbSink(config, run_config))
    return sinks


def progress_line(record: Record, train_iters: int) -> str:
    """One line for a person, in the manner of Megatron-LM's log."""
    loss = record["lm_loss"]
    parts = [
        f"iteration {record['iteration']:8d}/{train_iters:8d}",
        f"consumed samples: {record['consumed_samples']}",
        f"consumed tokens: {record['consumed_tokens']}",
        f"step time (ms): {1e3 * record['step_time']:.1f}",
        f"tokens/s: {record['tokens_per_second']:,.0f}",
        f"TFLOP/s/device (causal): {record['tflops_per_device']:.3g}",
        "MFU (causal): " + ("unknown" if record["mfu"] is None else f"{100 * record['mfu']:.1f} %"),
        f"learning rate: {record['learning_rate']:.4E}",
        f"global batch size: {record['global_batch_size']}",
        "lm loss: " + (f"{loss:.6E}" if loss is not None else "none (every step skipped)"),
        "grad norm: " + (f"{record['grad_norm']:.3f}" if record["grad_norm"] is not None else "none"),
        f"loss scale: {record['loss_scale']:.1f}",
        f"skipped iterations: {record['skipped_iterations']}",
        f"nan iterations: {record['nan_iterations']}",
        *([f"spikes: {record['spike_iterations']}"] if record["spike_iterations"] else []),
        f"peak memory (GiB): {record['peak_memory_bytes'] / 2**30:.2f}",
    ]
    if "moe_load_max" in record:
        load = "{moe_load_min:.2f} to {moe_load_max:.2f} of an even share".format(**record)
        parts.append(f"expert load: {load}")
        parts.append(f"load balancing loss: {record['moe_aux_loss']:.4f}")
    return " " + " | ".join(parts)
