"""The predicted time of a step in a dry run. torch is imported only to predict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.extensions.planner.device_file import DeviceFile, read_device
from megatron.training.config.run_config import RunConfig

if TYPE_CHECKING:
    from megatron.extensions.planner.time.step_time import StepTime


class DeviceError(ValueError):
    """A device file lacks what a step needs."""


@dataclass(frozen=True)
class PredictedStep:
    """A predicted step on a kind of device."""

    time: StepTime
    device: DeviceFile
    world_size: int
    gpus_per_node: int

    @property
    def record(self) -> dict[str, Any]:
        """As JSON: seconds and shares."""
        time = self.time
        return {
            "device": self.device.name,
            "gpus_per_node": self.gpus_per_node,
            "seconds": time.seconds,
            "tokens_per_second": time.tokens_per_second,
            "tokens_per_second_per_device": time.tokens_per_second / self.world_size,
            "tflops": time.tflops,
            "mfu": time.mfu,
            "bubble": time.bubble,
            "bound_by": time.bound_by,
            "parts_of_pp_rank": time.parts_of_pp_rank,
            "parts": time.parts,
        }


def predicted_step(config: RunConfig, world_size: int, device: str, gpus_per_node: int | None) -> PredictedStep:
    """Predicts a step on the device of a file. Raises DeviceError."""
    from megatron.extensions.planner.time.step_time import predict_step

    speeds = read_device(device)
    nodes = gpus_per_node or speeds.ranks_of_node(world_size)
    try:
        return PredictedStep(predict_step(config, world_size, speeds, nodes), speeds, world_size, nodes)
    except ValueError as error:
        raise DeviceError(str(error)) from error


def step_lines(step: PredictedStep) -> Iterator[str]:
    """Speed, what bounds it, and what the time is spent on."""
    time = step.time
    yield f"{step.device.name}, {step.gpus_per_node} a node: every figure is predicted, none is measured"
    mfu = share_text(time.mfu)
    yield (
        f"{time.seconds:.4g} s a step, {time.tokens_per_second / step.world_size:,.0f} tokens/s a device, "
        f"{time.tflops:.4g} TFLOP/s a device (causal), MFU {mfu} (causal), bound by {_title(time.bound_by)}"
    )
    if time.parts_of_pp_rank is not None:
        yield f"bubble {time.bubble:.1%} of the step by these times, the mean of the pipeline ranks"
        yield f"the time of pp {time.parts_of_pp_rank}, which has most work:"
    for subject, seconds in sorted(time.parts.items(), key=lambda part: -part[1]):
        if seconds:
            yield f"    {_title(subject):<22}{1e3 * seconds:>12,.1f} ms{seconds / time.seconds:>8.1%}"


def share_text(share: float | None) -> str:
    """In percent, or that it is not known."""
    return "unknown" if share is None else f"{share:.1%}"


def _title(subject: str) -> str:
    return subject.replace("_", " ").replace("tp ", "TP ").replace("cp ", "CP ").replace("ep ", "EP ")
