"""Kernels of a training step on a GPU, without one: launches, bytes, FLOPs, and predicted times by a device file.

    python tools/bench/gpu_bytes.py --config llama-8b-layers
    python tools/bench/gpu_bytes.py --config llama-8b-layers --precision fp8 --recipe tensorwise --kernels

The steps are those of pretrain_gpt.py on fake CUDA tensors, with compiled regions compiled by Inductor for the device.
Four of them are traced, of one and two layers in one and two micro-batches; their differences are what a layer does in
a micro-batch, what a layer does once a step (as casting weights), what a micro-batch does beside layers (embedding,
output layer, loss) and what a step does beside both (optimizer). A step of any size is predicted from these.

Needs torch's CUDA build and a C++ compiler; exits with code 2 where they are missing. docs/performance.md explains how
bytes are counted and times predicted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.core.parts import linear_format
from megatron.extensions.planner.device_file import DeviceFile, device_names, read_device
from megatron.training.config.run_config import RunConfig
from tools.bench.gpu import PRECISIONS, SHAPES, Shape, config_of, largest_that_fits
from tools.bench.kernel_groups import (
    ELEMENTWISE,
    GROUPS,
    OF_FP8,
    Kernel,
    Sums,
    Table,
    combined,
    table_of,
    total,
)
from tools.bench.side_by_side import positive, replace_text

PARTS = {
    "layer": "a layer in a micro-batch",
    "layer, once a step": "a layer, once a step",
    "micro-batch": "a micro-batch beside layers",
    "step": "a step beside both",
}


@dataclass(frozen=True)
class Region:
    """A compiled region in all the traced steps."""

    name: str
    calls: int
    compilations: int
    eager_calls: int


@dataclass(frozen=True)
class Prediction:
    """Of one step."""

    layers: int
    micro_batches: int
    micro_batch_size: int
    device_ms: float
    host_ms: float
    """Time that the host takes to launch it: the step's, if it is longer."""

    tokens_per_second: float
    tflops: float
    """Causal model FLOPs."""

    mfu: float

    @property
    def step_ms(self) -> float:
        return max(self.device_ms, self.host_ms)


def parts_of(tables: Mapping[tuple[int, int], Table]) -> dict[str, Table]:
    """The parts of a step, from tables of steps of (layers, micro-batches) in {1, 2} x {1, 2}."""
    one, layers, batches, both = (tables[key] for key in ((1, 1), (2, 1), (1, 2), (2, 2)))
    return {
        "layer": combined([(both, 1), (layers, -1), (batches, -1), (one, 1)]),
        "layer, once a step": combined([(layers, 2), (one, -2), (both, -1), (batches, 1)]),
        "micro-batch": combined([(batches, 2), (one, -2), (both, -1), (layers, 1)]),
        "step": combined([(one, 4), (layers, -2), (batches, -2), (both, 1)]),
    }


def whole_step(parts: Mapping[str, Table], layers: int, micro_batches: int) -> Table:
    """A step of so many layers and micro-batches."""
    factors = {"layer": layers * micro_batches, "layer, once a step": layers, "micro-batch": micro_batches, "step": 1}
    return combined([(parts[part], factor) for part, factor in factors.items()])


def predicted(step: Table, config: RunConfig, device: DeviceFile, flops_per_token: float) -> Prediction:
    """Speed of a step whose kernels follow each other on one stream."""
    training, sums = config.training, total(step)
    assert training.num_microbatches is not None
    tokens = training.micro_batch_size * training.num_microbatches * config.model.seq_length
    device_ms, host_ms = sums.us / 1e3, sums.launches * device.host_launch_us / 1e3
    speed = tokens / max(device_ms, host_ms) * 1e3
    tflops = speed * flops_per_token / 1e12
    peak = device.peak_tflops[linear_format(config.parallel) or "bf16"]
    return Prediction(
        config.model.num_layers,
        training.num_microbatches,
        training.micro_batch_size,
        device_ms,
        host_ms,
        speed,
        tflops,
        tflops / peak,
    )


def traced(shape: Shape, samples: int, flags: str, device: DeviceFile, attention: str) -> tuple[dict[Any, Table], Any]:
    """Kernels of steps of (layers, micro-batches), and the regions that were compiled."""
    from tools.bench.fake_cuda import fake_cuda
    from tools.bench.kernel_trace import KernelCounter, Trace, counted_regions

    trace, tables = Trace(), {}
    with fake_cuda(device, attention) as mode:
        counter = KernelCounter(trace, int(device.cache_mib * 2**20), attention)
        with counted_regions(trace, counter, mode):
            for layers in (1, 2):
                for batches in (1, 2):
                    config = config_of(replace(shape, micro_batches=batches), layers, samples, flags)
                    kernels = one_step(config, trace, counter)
                    tables[layers, batches] = table_of(kernels, device)
    return tables, [Region(**vars(use)) for use in trace.regions.values() if use.calls]


def one_step(config: RunConfig, trace: Any, counter: Any) -> Counter[Kernel]:
    """The kernels of a run's first step."""
    import torch

    from megatron.extensions.fusions.hooks import KernelChoice
    from megatron.training.initialize import StartupPhases, initialize
    from megatron.training.reliability.launch import Launch
    from megatron.training.setup import build_run
    from megatron.training.train_step import train_step

    with (
        mock.patch("megatron.training.initialize.choose_device", return_value=torch.device("cuda", 0)),
        mock.patch.object(KernelChoice, "choose", lambda self, config, parallel, runtime: parallel),  # is given
        mock.patch.object(KernelChoice, "on_model"),  # there is nothing to time
    ):
        run = build_run(config, initialize(config, Launch(), StartupPhases()))
    counter.prepare(run.stages.values(), fp8=linear_format(config.parallel) is not None)
    trace.restart()
    with counter:
        train_step(run)
    run.data.close()
    return trace.kernels


def rows_of(table: Table) -> dict[str, Sums]:
    """Sums by group, in the order of `GROUPS`."""
    return {group: sums for group in GROUPS if any(vars(sums := total(table, [group])).values())}


def say_groups(title: str, table: Table) -> None:
    print(f"\n{title:<34}{'launches':>9}{'read MB':>10}{'written':>9}{'TFLOP':>8}{'predicted µs':>14}")
    for name, sums in [*rows_of(table).items(), ("sum", total(table))]:
        print(
            f"  {name:<32}{sums.launches:>9.0f}{sums.read / 1e6:>10,.0f}{sums.written / 1e6:>9,.0f}"
            f"{sums.flops / 1e12:>8.2f}{sums.us:>14,.0f}"
        )


def say_kernels(title: str, table: Table) -> None:
    print(f"\n{title}, by kernel\n{'launches':>10}{'read MB':>10}{'written':>10}{'predicted µs':>14}  group: kernel")
    for (group, name), sums in sorted(table.items(), key=lambda item: -item[1].us):
        moved = f"{sums.read / 1e6:>10,.1f}{sums.written / 1e6:>10,.1f}"
        print(f"{sums.launches:>10.0f}{moved}{sums.us:>14,.1f}  {group}: {name}")


def say_regions(regions: Sequence[Region]) -> None:
    print("\ncompiled regions in all traced steps (graphs: forward and backward ones apart)")
    for region in regions:
        eager = f"; EAGER in {region.eager_calls} calls" if region.eager_calls else ""
        print(f"  {region.name}: {region.compilations} graphs, {region.calls} calls{eager}")
    eager = [region.name for region in regions if region.eager_calls]
    print(f"  regions that ran eager: {', '.join(eager) or 'none'}")


def say_missing(step: Table, config: RunConfig, matmul_flops_per_token: float) -> None:
    """Says so if the products that were found cannot be all."""
    training = config.training
    tokens = training.micro_batch_size * (training.num_microbatches or 1) * config.model.seq_length
    share = total(step, ["GEMMs"]).flops / (tokens * matmul_flops_per_token)
    if share < 0.99:
        print(f"\nWARNING: the GEMMs found have {share:.1%} of the model's FLOPs: operations are missing above")


def say_prediction(found: Prediction, device: DeviceFile, attention: str) -> None:
    bound = "host" if found.host_ms > found.device_ms else "device"
    print(
        f"\npredicted for {device.name} with {attention} attention: {found.layers} layers, {found.micro_batches} "
        f"micro-batches of {found.micro_batch_size} a step\n"
        f"  predicted step {found.step_ms:,.1f} ms, bound by the {bound} (launches: predicted {found.host_ms:,.1f})\n"
        f"  predicted {found.tokens_per_second:,.0f} tokens/s, predicted {found.tflops:.0f} TFLOP/s (causal), "
        f"predicted MFU {found.mfu:.1%} (causal)"
    )


def as_json(parts: Mapping[str, Table]) -> dict[str, Any]:
    """Sums of each part by group and by kernel."""
    return {
        part: {
            "groups": {group: asdict(sums) for group, sums in rows_of(table).items()},
            "kernels": [
                {"group": group, "kernel": name, **asdict(sums)} for (group, name), sums in sorted(table.items())
            ],
        }
        for part, table in parts.items()
    }


def parser_of_args() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=SHAPES, required=True)
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    parser.add_argument("--recipe", default="delayed", help="--fp8-recipe, with --precision fp8")
    parser.add_argument("--fp8-format", default="hybrid")
    parser.add_argument("--flags", default="", help="more of pretrain_gpt.py's flags, in quotes")
    parser.add_argument("--device", default="h100", help=f"{', '.join(device_names())}, or a device file")
    parser.add_argument("--attention", choices=("cudnn", "flash", "flash3"), default="cudnn", help="its kernel")
    parser.add_argument("--layers", type=positive, help="of the predicted step; else the shape's, or as many as fit")
    parser.add_argument("--samples", type=positive, help="in a micro-batch; else as many as fit")
    parser.add_argument("--memory-share", type=float, default=0.8, help="of the device's memory, to be planned with")
    parser.add_argument("--kernels", action="store_true", help="list every kernel of a layer, a micro-batch and a step")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    return parser


def predicted_config(args: argparse.Namespace, device: DeviceFile) -> tuple[RunConfig, str]:
    """The configuration of the predicted step, and its flags. Raises ValueError."""
    flags = f"{PRECISIONS[args.precision].format(format=args.fp8_format, recipe=args.recipe)} {args.flags}"
    shape = SHAPES[args.config]
    if args.layers is not None:
        shape = replace(shape, layers=args.layers)
    if args.samples is not None and shape.layers is not None:
        return config_of(shape, shape.layers, args.samples, flags), flags
    room = int(args.memory_share * device.memory_gib * 2**30)
    return largest_that_fits(shape, flags, room), flags


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of_args()
    args = parser.parse_args(argv)
    from megatron.extensions.planner.flops import model_flops
    from tools.bench.fake_cuda import unavailable

    if (problem := unavailable()) is not None:
        print(f"{Path(__file__).name} {problem}", file=sys.stderr)
        return 2
    try:
        device = read_device(args.device)
        config, flags = predicted_config(args, device)
    except ValueError as error:
        parser.error(str(error))
    flops = model_flops(config.model)
    tables, regions = traced(SHAPES[args.config], config.training.micro_batch_size, flags, device, args.attention)
    parts = parts_of(tables)
    assert config.training.num_microbatches is not None
    step = whole_step(parts, config.model.num_layers, config.training.num_microbatches)
    found = predicted(step, config, device, flops.total)
    precision = args.precision if args.precision != "fp8" else f"fp8 {args.recipe}"
    print(f"{args.config} {precision}: kernels and bytes of a trace on fake tensors; all times are predicted")
    for part, title in PARTS.items():
        say_groups(title, parts[part])
        if args.kernels:
            say_kernels(title, parts[part])
    layer = parts["layer"]
    print(f"\nelement-wise bytes of a layer: {total(layer, ELEMENTWISE).moved / 1e9:.2f} GB")
    if args.precision == "fp8":
        print(f"fp8 casts, transposes and gradient sums of a layer: {total(layer, OF_FP8).moved / 1e9:.2f} GB")
    say_regions(regions)
    say_missing(step, config, flops.matmul)
    say_prediction(found, device, args.attention)
    if args.json is not None:
        figures = {
            "note": "times (us, ms) and speeds are predicted, not measured",
            "config": args.config,
            "precision": precision,
            "device": args.device,
            "attention": args.attention,
            "flags": args.flags,
            "parts": as_json(parts),
            "regions": [asdict(region) for region in regions],
            "predicted": {**asdict(found), "step_ms": found.step_ms, "flops_per_token": flops.total},
        }
        replace_text(args.json, json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
