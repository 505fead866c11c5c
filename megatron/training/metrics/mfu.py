"""Model FLOPs utilization (MFU): achieved model FLOP/s as a share of the device's peak.

Model FLOPs count causal attention as half of the s x s square and no recomputation. An extension counts them
(`MODEL_FLOPS`). No torch until a device is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron.core.config.model import TransformerConfig
from megatron.core.registry import NoFacts, Registry
from megatron.training.config.run_config import LoggingConfig, RunConfig

if TYPE_CHECKING:
    import torch

MODEL_FLOPS: Registry[Callable[[TransformerConfig], float], NoFacts] = Registry("count of FLOPs", NoFacts, "model")
"""`count(model)`: model FLOPs of forward and backward per token. Without an entry no record has TFLOP/s and MFU."""

# Dense tensor-core peaks in TFLOP/s, from the vendor's data sheets.
PEAK_TFLOPS_16BIT = {"A100": 312.0, "H100": 989.4, "H200": 989.4, "H800": 989.4, "A800": 312.0, "B200": 2250.0}
PEAK_TFLOPS_FP8 = {"H100": 1978.9, "H200": 1978.9, "H800": 1978.9, "B200": 4500.0}


def peak_tflops(config: LoggingConfig, device: torch.device, dtype: torch.dtype, fp8: bool = False) -> float | None:
    """Peak TFLOP/s of one device: --peak-tflops, or the data sheet's value for 16-bit or fp8 training; None if
    neither is known."""
    if config.peak_tflops is not None:
        return config.peak_tflops
    if device.type != "cuda" or dtype.itemsize != 2:
        return None
    import torch

    name = torch.cuda.get_device_name(device)
    peaks = PEAK_TFLOPS_FP8 if fp8 else PEAK_TFLOPS_16BIT
    return next((peak for key, peak in peaks.items() if key in name), None)


def utilization(config: RunConfig, device: torch.device, tokens_per_second: float, world_size: int) -> dict[str, Any]:
    """TFLOP/s of one device and MFU of a run; nothing where nobody counts FLOPs."""
    import torch

    if not MODEL_FLOPS:
        return {}
    tflops = tokens_per_second * MODEL_FLOPS[[*MODEL_FLOPS][-1]](config.model) / world_size / 1e12
    dtype = getattr(torch, config.parallel.params_dtype)
    peak = peak_tflops(config.logging, device, dtype, config.parallel.fp8_format is not None)
    return {"tflops_per_device": tflops, "mfu": tflops / peak if peak else None}
