"""Log flags, and registration of sinks and log formats. This module does not import torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from megatron.core.config.flag_spec import flag
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS, extension_flags
from megatron.training.metrics.log_formats import LOG_FORMATS
from megatron.training.metrics.sinks import SINKS

HERE = "megatron.extensions.observe.logs"


@extension_flags("logs: TensorBoard, Weights & Biases, Prometheus, samples, sums", may_change=True)
@dataclass(frozen=True)
class LogsConfig:
    tensorboard_dir: str | None = flag(None, path="local", writes="folder", first_run=True)
    """Folder for TensorBoard event files."""

    wandb_project: str | None = flag(None, empty_is_none=True)
    """Weights & Biases project. Requires the wandb package."""

    wandb_exp_name: str | None = flag(None, empty_is_none=True, no_effect_without="--wandb-project")
    """Weights & Biases run name."""

    wandb_entity: str | None = flag(None, empty_is_none=True, no_effect_without="--wandb-project")
    """Weights & Biases team or user. Default: the account that is logged in."""

    wandb_save_dir: str | None = flag(
        None, path="local", writes="folder", empty_is_none=True, no_effect_without="--wandb-project"
    )
    """Folder for Weights & Biases files. Default: the environment variable WANDB_DIR, or --save if the variable
    is not set, or a temporary folder if neither is set."""

    prometheus_port: int | None = flag(None, at_least=1, at_most=65535)
    """Port on which the first rank serves the latest values of all metrics to Prometheus. Requires the
    prometheus_client package."""

    prometheus_host: str = flag("127.0.0.1", no_effect_without="--prometheus-port")
    """Address of --prometheus-port. Anyone who can connect to this address can read the metrics."""

    log_throughput: bool = False
    """--log-format megatron: print the throughput per device. The default log format always prints the throughput."""

    sample_log: str | None = flag(None, path="local", writes="file")
    """File for the samples of each training step. Each line is a JSON object."""

    document_loss_log: str | None = flag(
        None,
        path="local",
        writes="file",
        no_effect_without="--eval-iters above 0",
        excludes="--fim-data: it rearranges the tokens of documents",
    )
    """File for the loss of each document in evaluations. Each line is a JSON object. Lines are sorted by decreasing
    loss."""

    log_source_loss: bool = False
    """Log the training and validation loss of each data set of a blend."""

    log_params_norm: bool = False
    """Log the L2 norm of all parameters."""

    log_num_zeros_in_grad: bool = False
    """Log the number of zeros in the gradient."""


def _when(wants: Callable[[LogsConfig], object]) -> Callable[[RunConfig], bool]:
    return lambda config: bool(wants(config.options(LogsConfig)))


SINKS.register("TensorBoard", f"{HERE}.dashboards:TensorBoardSink", when=_when(lambda o: o.tensorboard_dir))
SINKS.register("Weights & Biases", f"{HERE}.dashboards:WandbSink", when=_when(lambda o: o.wandb_project))
SINKS.register("Prometheus", f"{HERE}.prometheus:PrometheusSink", when=_when(lambda o: o.prometheus_port))
LOG_FORMATS.substitute("default", f"{HERE}.terminal:TerminalLines", when=lambda *run: sys.stdout.isatty())
LOG_FORMATS.register("megatron", f"{HERE}.megatron_format:MegatronLines")
CALLBACKS.register("samples", f"{HERE}.meters:SampleLog", when=_when(lambda o: o.sample_log))
CALLBACKS.register(
    "losses of documents", f"{HERE}.document_losses:DocumentLosses", when=_when(lambda o: o.document_loss_log)
)
CALLBACKS.register("losses of data sets", f"{HERE}.meters:SourceLosses", when=_when(lambda o: o.log_source_loss))
CALLBACKS.register(
    "sums", f"{HERE}.meters:ModelSums", when=_when(lambda o: o.log_params_norm or o.log_num_zeros_in_grad)
)
