"""Measure the speed of this machine, and write a device file, from which the planner predicts step times.

    python tools/calibrate.py --output mine.yaml                                       one GPU; with --cpu one process
    torchrun --nproc-per-node 8 tools/calibrate.py --output mine.yaml                  a node with its links
    torchrun --nnodes 2 --nproc-per-node 8 ... tools/calibrate.py --output mine.yaml   several nodes and the network
    python pretrain_gpt.py ... --dry-run --device mine.yaml                            predict step times from the file

The tool measures GEMMs by shape, attention, copies, short steps of a small model, and collectives by size, within a
node and between nodes. All ranks measure at the same time, because all ranks also compute at the same time in training.
Launch this tool with as many ranks per node as the training run, and bind the ranks to the same processors. The
measurement takes about --seconds. With --cpu, the tool measures the processors and gloo. The GPU measurements have not
been tested on a GPU yet.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing as mp
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if not __package__:  # When this file runs as a script, the repository is not in the module path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "tools"

from megatron.extensions.plan.planner.device_file import DeviceFile, read_device, tile_share
from megatron.training.config.arguments import command_line
from megatron.training.config.prepare import prepare
from megatron.training.reliability.launch import Launch

from .common import processor_name, refuse_unwritable, run_tool, tool_parser

if TYPE_CHECKING:
    import torch

    from megatron.extensions.plan.planner.calibration.fit import Measured
    from megatron.extensions.plan.planner.calibration.measure import Clock

POINTS = 100
"""Approximate number of measurements, which together take about --seconds."""

STEPS = (
    "--mock-data --vocab-size 512 --hidden-dropout 0 --attention-dropout 0 --lr 1e-3 --micro-batch-size 1 "
    "--log-interval 1 --eval-iters 0 --num-workers 0"
).split()
SMALL = "--cpu --num-attention-heads 4 --hidden-size"
LARGE = "--bf16 --num-attention-heads 16 --seq-length 2048 --hidden-size"
STEPS_OF_CPU = (
    f"{SMALL} 256 --num-layers 1 --seq-length 256 --global-batch-size 2",
    f"{SMALL} 256 --num-layers 4 --seq-length 256 --global-batch-size 2",
    f"{SMALL} 128 --num-layers 4 --seq-length 64 --global-batch-size 8",
    f"{SMALL} 512 --num-layers 1 --seq-length 128 --global-batch-size 2",
)
STEPS_OF_GPU = (
    f"{LARGE} 2048 --num-layers 1 --global-batch-size 2",
    f"{LARGE} 2048 --num-layers 4 --global-batch-size 4",
)
ITERATIONS = 7


def main(argv: Sequence[str] | None = None) -> int:
    parser = tool_parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="the device file, YAML")
    parser.add_argument("--cpu", action="store_true", help="measure processors and gloo")
    parser.add_argument(
        "--seconds", type=float, default=90.0, help="approximate duration of the measurement (default: 90; 5 to 240)"
    )
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=["fp64", "fp32", "bf16"],
        help="precisions of GEMMs; attention uses the last one (default: fp32 on a CPU, fp32 and bf16 on a GPU)",
    )
    parser.add_argument(
        "--kernels", type=Path, help="measure only collectives, and take all other values from this device file"
    )
    args = parser.parse_args(argv)
    if not 5 <= args.seconds <= 240:
        parser.error(f"--seconds {args.seconds:g} must be from 5 to 240")
    for path in (args.output, args.kernels):
        if path is not None and path.suffix != ".yaml":
            parser.error(f"{path} must end in .yaml, because --device requires that suffix")
    if os.environ.get("RANK", "0") == "0":
        refuse_unwritable("--output", args.output)
    import torch

    if not args.cpu and not torch.cuda.is_available():
        parser.error("there is no GPU on this machine; --cpu measures the processors")
    return calibrate(args)


def calibrate(args: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist

    from megatron.extensions.plan.planner.calibration.measure import Clock
    from megatron.training.initialize import keep_memory

    world, local = (int(os.environ.get(name, given)) for name, given in (("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")))
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    device = torch.device("cpu") if args.cpu else torch.device("cuda", local)
    keep_memory(device)  # training runs use the same malloc settings
    if args.cpu:
        torch.set_num_threads(1)
    measured = () if args.kernels else STEPS_OF_CPU if args.cpu else STEPS_OF_GPU
    steps = [(flags, step_seconds(flags)) for flags in measured]
    if not args.cpu:
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("gloo" if args.cpu else "nccl")
    clock = Clock(device, args.seconds / POINTS / 4)
    precisions = args.precision or (["fp32"] if args.cpu else ["fp32", "bf16"])
    found, accuracy = measured_device(args, clock, precisions, ranks_per_node, steps)
    if world == 1 or dist.get_rank() == 0:
        errors = ", ".join(f"{what} {100 * error:.0f} %" for what, error in accuracy.items())
        how = f"{world} rank{'s' * (world > 1)}, {ranks_per_node} per node, on torch {torch.__version__}"
        write(args.output, found, how, errors)
    if world > 1:
        dist.destroy_process_group()
    return 0


def measured_device(
    args: argparse.Namespace,
    clock: Clock,
    precisions: Sequence[str],
    ranks_per_node: int,
    steps: Sequence[tuple[str, float]],
) -> tuple[DeviceFile, dict[str, float]]:
    """Fit a device file to measurements of all ranks, and return it together with the median prediction error for each
    kind of measurement. All ranks must call this function."""
    from megatron.extensions.plan.planner.calibration.fit import errors, fit_steps, links_of
    from megatron.extensions.plan.planner.calibration.measure import CPU, GPU, measure, measure_links

    sizes = CPU if args.cpu else GPU
    points, slowdown = measure_links(clock, sizes, ranks_per_node)
    if args.kernels:
        found = read_device(str(args.kernels))
        accuracy = {}
    else:
        measured = measure(clock, sizes, precisions)
        found = described(measured, clock.device, ranks_per_node)
        together = [(flags, clock.agreed(seconds)) for flags, seconds in steps]
        found = fit_steps(found, [(partial(predicted, flags), seconds) for flags, seconds in together])
        accuracy = errors(found, measured)
        accuracy["steps"] = median(abs(predicted(flags, found) / seconds - 1) for flags, seconds in together)
    links = links_of(points, ranks_per_node)
    return replace(found, links=links, overlap_slowdown=slowdown, ranks_per_node=ranks_per_node), accuracy


def step_seconds(flags: str) -> float:
    """Measure a training step in a separate process, and return its seconds. Call this function before the calling
    process uses its GPU."""
    with tempfile.TemporaryDirectory(prefix="calibrate-") as folder:
        metrics, screen = Path(folder) / "metrics.jsonl", Path(folder) / "screen"
        words = [*flags.split(), *STEPS, "--train-iters", str(ITERATIONS), "--metrics-file", str(metrics)]
        process = mp.get_context("fork" if "--cpu" in words else "spawn").Process(target=_train, args=(words, screen))
        process.start()
        process.join()
        if process.exitcode:
            raise ValueError(f"steps of {flags} were not measured, exit code {process.exitcode}: {screen.read_text()}")
        times = [json.loads(line)["step_time"] for line in metrics.read_text().splitlines()]
    return median(times[2:])


def _train(words: list[str], screen: Path) -> None:
    """Run one rank in a separate process whose output goes to a file."""
    output = os.open(screen, os.O_WRONLY | os.O_CREAT)
    for standard in (1, 2):
        os.dup2(output, standard)
    local = os.environ.get("LOCAL_RANK", "0")
    for name in [name for name in os.environ if name in LAUNCHED or name.startswith("TORCHELASTIC")]:
        del os.environ[name]
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", local)
    import pretrain_gpt

    os._exit(pretrain_gpt.main(words))


LAUNCHED = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT SLURM_STEP_NUM_TASKS".split()


def predicted(flags: str, device: DeviceFile) -> float:
    """Predict the time of a training step in a single process, in seconds."""
    from megatron.extensions.plan.planner.time.step_time import predict_step

    launch = Launch(0, 1)
    with contextlib.redirect_stderr(io.StringIO()):
        config = prepare(command_line([*flags.split(), *STEPS, "--train-iters", str(ITERATIONS)], launch), launch)
    return predict_step(config, 1, device).seconds


def described(measured: Measured, device: torch.device, ranks_per_node: int) -> DeviceFile:
    """Return a device file with the measured rates of this machine. The file does not describe the links between
    devices."""
    import torch

    from megatron.extensions.plan.planner.calibration.fit import device_file
    from megatron.training.metrics.summary import PEAK_TFLOPS_16BIT

    if device.type == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks_per_node / 2**30
        return device_file(measured, {}, name=processor_name(), multiprocessors=1, memory_gib=memory)
    about = torch.cuda.get_device_properties(device)
    peaks = [peak for name, peak in PEAK_TFLOPS_16BIT.items() if name in about.name]
    shapes = {(each.m, each.n) for each, _ in measured.products}
    return device_file(
        measured,
        {(m, n): tile_share(m, n, about.multi_processor_count) for m, n in shapes},
        name=about.name,
        capability=(about.major, about.minor),
        multiprocessors=about.multi_processor_count,
        memory_gib=about.total_memory / 2**30,
        cache_mib=about.L2_cache_size / 2**20,
        shared_memory_kib=about.shared_memory_per_block_optin // 1024,
        **({"peak_tflops": {"bf16": peaks[0]}} if peaks else {}),
    )


def write(path: Path, device: DeviceFile, how: str, errors: str) -> None:
    from megatron.extensions.plan.planner.calibration.fit import text_of

    remarks = [f"{device.name}. megatron/extensions/plan/planner/device_file.py describes each entry."]
    remarks.append(f"Measured by tools/calibrate.py with {how}.")
    remarks += [f"Median errors of the fit: {errors}."] if errors else []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of(device, remarks))
    print(path.read_text(), end="")


if __name__ == "__main__":
    run_tool(main)
