"""Flags of states and activations in host memory, and where their parts are. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.flag_spec import flag
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.parts import HOST_UPDATES
from megatron.training.extensions import extension_flags

HERE = "megatron.extensions.offload"


@extension_flags("optimizer states in host memory", may_change=True, rules=f"{HERE}.rules:states")
@dataclass(frozen=True)
class HostStateFlags:
    optimizer_cpu_offload: bool = False
    """Keep optimizer states in host memory, --optimizer-offload-fraction of them, and update them there: gradients are
    copied to the host, updated parameters back, while the next ones are updated (ZeRO-Offload)."""

    optimizer_offload_fraction: float = flag(1.0, at_least=0, at_most=1)
    """--optimizer-cpu-offload: share of the elements whose states lie in host memory, in [0, 1]."""

    pin_cpu_grads: bool = flag(True, name="--no-pin-cpu-grads")
    """--optimizer-cpu-offload: pass gradients through pageable instead of pinned host memory."""

    pin_cpu_params: bool = flag(True, name="--no-pin-cpu-params")
    """--optimizer-cpu-offload: pass parameters through pageable instead of pinned host memory."""


def _fraction(optimizer: OptimizerConfig) -> float:
    options = optimizer.options(HostStateFlags)
    return options.optimizer_offload_fraction if options.optimizer_cpu_offload else 0.0


HOST_UPDATES.register("host", f"{HERE}.host_update:build_host_update", fraction=_fraction)
