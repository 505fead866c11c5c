"""Output of the training loop: metric records to the sinks, progress lines or a progress bar to the console."""

from __future__ import annotations

import importlib.util
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.storage import gather
from megatron.core.tokenizers.kept_files import keep_tokenizer
from megatron.training.config.arguments import flat_values, save_config
from megatron.training.diagnosis.straggler import straggler_line
from megatron.training.hooks import METRICS
from megatron.training.metrics import megatron_format
from megatron.training.metrics.sinks import Record, Sink, open_sinks
from megatron.training.run import TrainingRun

CONFIG_FILE = "run_config.yaml"

SCHEMA = 1
"""Version of the keys and units of records, documented in docs/getting_started.md. Higher where one changes its meaning
or goes; new ones may come with the same version."""


class RunLog:
    """Writes records and progress on the first rank, and nothing on the others.

    Creates --save and writes the resolved configuration into it. Collective: with --log-straggler the ranks exchange
    their host names. Everything is closed with `resources`, or when the process ends by a failure.
    """

    def __init__(self, run: TrainingRun, resources: ExitStack) -> None:
        config, runtime, iteration = run.config, run.runtime, run.progress.iteration
        self._runtime, self._train_iters, self._options = runtime, run.train_iters, config.logging
        self._hosts = gather(socket.gethostname(), runtime.state.world) if config.logging.log_straggler else []
        self._sinks: list[Sink] = []
        self._bar: Any = None  # tqdm's
        if not runtime.is_main:
            return
        save = config.checkpoint.save
        if save:
            Path(save).mkdir(parents=True, exist_ok=True)
            save_config(config, Path(save) / CONFIG_FILE)
            keep_tokenizer(config.tokenizer, Path(save))
        self._sinks = open_sinks(config.logging, save, iteration, flat_values(config))
        for sink in self._sinks:
            resources.callback(sink.close)
            runtime.watchdog.failures.at_exit.append(sink.close)
        if sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None:
            from tqdm import tqdm

            self._bar = tqdm(total=run.train_iters, initial=iteration, unit="it", dynamic_ncols=True)
            resources.callback(self._bar.close)

    def write(self, record: Record) -> None:
        """Writes a record to every sink, with the time and the version of the schema."""
        stamped = record | {"time": round(time.time(), 3), "schema": SCHEMA}
        for sink in self._sinks:
            sink.write(stamped)

    def report(self, record: Record) -> None:
        """Writes the record of an interval and prints it."""
        self.write(record)
        line = "\n".join([self._line(record), *straggler_line(record, self._hosts)])
        if self._bar is None:
            self._runtime.say(line)
            return
        self._bar.write(line)
        if record["lm_loss"] is not None:
            self._bar.set_postfix(loss=f"{record['lm_loss']:.4f}")

    def _line(self, record: Record) -> str:
        if self._options.log_format == "megatron":
            return megatron_format.progress_line(record, self._train_iters, self._options.log_throughput)
        return progress_line(record, self._train_iters)

    def step(self) -> None:
        """Advances the progress bar."""
        if self._bar is not None:
            self._bar.update(1)


def mtp_losses(record: Record) -> list[tuple[str, float]]:
    """(key, loss) of each depth of multi-token prediction that has one."""
    return [(key, loss) for key, loss in record.items() if key.startswith("mtp_loss_") and loss is not None]


def progress_line(record: Record, train_iters: int) -> str:
    """One line of the console log."""
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
        *([f"lm loss: {record['lm_loss']:.6E}"] if record["lm_loss"] is not None else ["every step was skipped"]),
        *(f"{key.replace('_', ' ')}: {loss:.6E}" for key, loss in mtp_losses(record)),
        *([f"grad norm: {record['grad_norm']:.3f}"] if record["grad_norm"] is not None else []),
        *([f"params norm: {record['params_norm']:.3f}"] if "params_norm" in record else []),
        *([f"num zeros: {record['num_zeros']:.0f}"] if "num_zeros" in record else []),
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
    parts += [f"{name}: {record[name]:.6g}" for name in METRICS if record.get(name) is not None]
    return " " + " | ".join(parts)
