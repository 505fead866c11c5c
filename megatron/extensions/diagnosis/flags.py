"""Callbacks of diagnosis, and the configurations that have them. No torch."""

from __future__ import annotations

from megatron.training.hooks import CALLBACKS

_HERE = "megatron.extensions.diagnosis"

CALLBACKS.register(
    "profiler",
    f"{_HERE}.profiler:Profiler",
    when=lambda config: config.logging.profile or config.logging.record_memory_history,
)
CALLBACKS.register("tracer", f"{_HERE}.trace.tracer:Tracer", when=lambda config: config.logging.trace)
CALLBACKS.register("stragglers", f"{_HERE}.straggler:Stragglers", when=lambda config: config.logging.log_straggler)
CALLBACKS.register(
    "layer statistics",
    f"{_HERE}.layer_stats.statistics:LayerStats",
    when=lambda config: config.logging.log_layer_stats > 0,
)
