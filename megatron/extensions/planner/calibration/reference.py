"""Constants of a device file that only whole steps show: element-wise operations as they occur, the host's time for
each operation, and the fixed time of a step. No torch.

They are fitted to measured steps of one process, whose prediction is a line in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron.extensions.planner.calibration.fit import line
from megatron.extensions.planner.device_file import DeviceFile

Predict = Callable[[DeviceFile], float]
"""Seconds of a step, predicted for a device."""


def fit_steps(device: DeviceFile, steps: Sequence[tuple[Predict, float]]) -> DeviceFile:
    """The device with the bandwidth, the gap between operations and the overhead of a step that suit best the measured
    seconds of steps. On GPUs, whose bandwidth a copy shows, the overhead alone."""
    alone = replace(device, copy_tb_per_second=1e9, launch_gap_us=0.0, step_overhead_ms=0.0, kernel_floor_us=0.0)
    fixed = [predict(alone) for predict, _ in steps]
    rows = [
        [
            predict(replace(alone, copy_tb_per_second=device.copy_tb_per_second)) - base,
            predict(replace(alone, launch_gap_us=1.0)) - base,
            1e-3,
        ]
        for (predict, _), base in zip(steps, fixed, strict=True)
    ]
    left = [max(1e-9, seconds - base) for (_, seconds), base in zip(steps, fixed, strict=True)]
    if device.capability is not None:
        rest = [seconds - predict(replace(device, step_overhead_ms=0.0)) for predict, seconds in steps]
        return replace(device, step_overhead_ms=max(0.0, 1e3 * min(rest)))
    moved, gap, overhead = line(rows, left)
    return replace(
        device,
        copy_tb_per_second=device.copy_tb_per_second / moved if moved else device.copy_tb_per_second,
        launch_gap_us=gap,
        step_overhead_ms=overhead,
        kernel_floor_us=0.0,
    )
