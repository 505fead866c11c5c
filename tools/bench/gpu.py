"""Benchmark training on one GPU: tokens/s, TFLOP/s, MFU, memory compared with the plan, and a breakdown of the step
time.

    python tools/bench/gpu.py --config llama-8b-layers --precision bf16
    python tools/bench/gpu.py --config gpt-1.3b --compare "--no-compile" --compare "--cuda-graph-impl local"
    python tools/bench/gpu.py --cpu --config tiny       # a trial in a few seconds, without a GPU

The measured steps are training steps of pretrain_gpt.py, including the optimizer, on mock tokens without dropout.
TFLOP/s are based on model FLOPs. Causal attention counts as half of full attention (docs/performance.md). MFU is the
ratio of TFLOP/s to the device's peak. For training in fp8, the peak is the fp8 peak. The tool selects the largest model
that fits into free memory according to the dry run's plan: llama-8b-layers varies the number of layers, and other
models vary the micro-batch size. Before the rounds, the tool measures upper limits of speed: an 8192 x 8192 x 8192
GEMM, the GEMMs of the model on random numbers, and a copy within device memory. Each `--compare FLAGS` adds a variant,
which runs the model with these additional flags of pretrain_gpt.py. Each variant runs in a separate process with an
equal part of the memory. The rounds of the processes are interleaved.
"""

from __future__ import annotations

import argparse
import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from megatron.core.tensor_parallel.linear_formats import linear_format
from megatron.extensions.plan.planner.flops import flops_per_token
from megatron.extensions.plan.planner.memory import memory_of_ranks
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve_legal
from megatron.training.reliability.launch import choose_allocators
from tools.bench import device_time, gpu_page
from tools.bench.side_by_side import (
    Contestant,
    Found,
    Round,
    Spread,
    bench_parser,
    compared,
    interleaved,
    machine,
    own_run,
    positive,
    say_rows,
    timed,
    write_json,
)

if TYPE_CHECKING:
    from megatron.training.run import TrainingRun

PLAIN = "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear --rotary-base 500000"
LLAMA = f"--group-query-attention {PLAIN}"
WIDE = (
    f"--hidden-size 4096 --num-attention-heads 32 --seq-length 8192 --untie-embeddings-and-output-weights {PLAIN} "
    "--ffn-hidden-size 14336"
)
PART = f"{WIDE} --vocab-size 32768"
"""Flags of models with a small vocabulary, in which the layers take most of the step time."""

GROUPED = f"{PART} --group-query-attention --num-query-groups 8"
LATENT = (
    f"{PART} --multi-latent-attention --q-lora-rank 1536 --qk-pos-emb-head-dim 64 --qk-layernorm "
    "--dsa-indexer-n-heads 16 --dsa-indexer-head-dim 128 --dsa-indexer-loss-coeff 0.01"
)


@dataclass(frozen=True)
class Shape:
    """Model whose size depends on the available memory. If `layers` is None, both the number of layers and the
    micro-batch size are chosen so that the model fits; otherwise, only the micro-batch size is chosen."""

    flags: str
    layers: int | None
    """Number of layers; None for as many layers as fit."""

    micro_batches: int
    """Number of micro-batches in a step."""

    most_samples: int = 16
    most_layers: int = 32


SHAPES = {
    "gpt-1.3b": Shape(
        "--hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --vocab-size 50304", 24, micro_batches=4
    ),
    "llama-8b-layers": Shape(
        f"{WIDE} --vocab-size 128256 --group-query-attention --num-query-groups 8",
        None,
        micro_batches=8,
        most_samples=1,
    ),
    "experts": Shape(
        f"{GROUPED} --num-experts 64 --moe-router-topk 8 --moe-ffn-hidden-size 1792 --moe-grouped-gemm "
        "--moe-aux-loss-coeff 1e-2",
        2,
        micro_batches=8,
        most_samples=1,
    ),
    "mamba2": Shape(
        f"{GROUPED} --hybrid-layer-pattern M-M-M-*- --mamba-num-groups 8 --mamba-num-heads 128 --mamba-head-dim 64 "
        "--mamba-state-dim 128",
        8,
        micro_batches=8,
        most_samples=1,
    ),
    "delta-nets": Shape(
        f"{GROUPED} --experimental-attention-variant gated_delta_net --linear-attention-freq 4 "
        "--linear-num-key-heads 16 --linear-num-value-heads 32 --linear-key-head-dim 128 --linear-value-head-dim 128",
        4,
        micro_batches=8,
        most_samples=1,
    ),
    "sparse": Shape(
        f"{LATENT} --kv-lora-rank 512 --qk-head-dim 128 --v-head-dim 128 --experimental-attention-variant dsa "
        "--dsa-indexer-topk 2048 --dsa-indexer-use-sparse-loss",
        2,
        micro_batches=4,
        most_samples=1,
    ),
    "compressed": Shape(
        f"{LATENT} --qk-head-dim 448 --v-head-dim 512 --experimental-attention-variant dsv4_hybrid "
        "--csa-compress-ratios [4,128] --csa-window-size 128 --csa-compress-rotary-base 160000 --o-groups 8 "
        "--o-lora-rank 1024 --dsa-indexer-topk 512",
        2,
        micro_batches=4,
        most_samples=1,
    ),
    "tiny": Shape(
        "--hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 4 --num-query-groups 2 --seq-length 32 "
        f"--vocab-size 512 --untie-embeddings-and-output-weights {LLAMA}",
        None,
        micro_batches=2,
        most_samples=2,
        most_layers=2,
    ),
}
PRECISIONS = {"bf16": "--bf16", "fp8": "--bf16 --fp8-format {format} --fp8-recipe {recipe}"}
CPU_BYTES = 2**26
"""Assumed memory size for a trial without a GPU."""


def config_of(shape: Shape, layers: int, samples: int, flags: str) -> RunConfig:
    """Return the resolved configuration. Raises ValueError if the flags are not valid."""
    text = (
        f"{shape.flags} --num-layers {layers} --micro-batch-size {samples} --attention-dropout 0 --hidden-dropout 0 "
        f"--global-batch-size {samples * shape.micro_batches} --mock-data --train-iters 1000000 --eval-iters 0 "
        f"--lr 1e-5 --num-workers 0 {flags}"
    )
    return resolve_legal(parse_args(text.split()), 1)


def planned_bytes(config: RunConfig) -> tuple[int, int, int]:
    """Return the planned bytes of states, activations and working memory on one device, as in a dry run."""
    (rank,) = memory_of_ranks(config, 1)
    return rank.plan.memory.total, rank.activations.peak, rank.working


def largest_that_fits(shape: Shape, flags: str, room: int) -> RunConfig:
    """Return the largest configuration that fits into `room` bytes according to the plan. If `shape` does not give the
    number of layers, choose the largest number that fits. Then choose the micro-batch size, which is the largest power
    of two that fits. Raise ValueError if even one layer with one sample does not fit."""
    tries = range(1, shape.most_layers + 1) if shape.layers is None else [shape.layers]
    # The planned memory grows with the number of layers, so a bisection finds the largest number that fits.
    fitting = bisect_right(tries, room, key=lambda layers: sum(planned_bytes(config_of(shape, layers, 1, flags))))
    if not fitting:
        least = sum(planned_bytes(config_of(shape, tries[0], 1, flags)))
        raise ValueError(f"the smallest configuration needs {gib(least)} GiB, and {gib(room)} are available")
    layers, samples = tries[fitting - 1], 2
    chosen = config_of(shape, layers, 1, flags)
    while samples <= shape.most_samples:
        larger = config_of(shape, layers, samples, flags)
        if sum(planned_bytes(larger)) > room:
            break
        chosen, samples = larger, samples * 2
    return chosen


def gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def built(config: RunConfig, warm_up: int) -> TrainingRun:
    """Build a single-process run as pretrain_gpt.py does, and run `warm_up` training steps."""
    run = own_run(config)
    take_steps(run, warm_up)
    return run


def take_steps(run: TrainingRun, steps: int) -> None:
    """Run training steps, and wait until the device has finished them."""
    from megatron.training.progress import Interval
    from megatron.training.train_step import train_step

    run.interval = Interval()
    for _ in range(steps):
        train_step(run)
    device_time.wait_for(run.runtime.device)


def round_of(run: TrainingRun, steps: int) -> Round:
    """Return a function that runs `steps` training steps and returns tokens per second."""
    tokens = steps * run.config.model.seq_length * (run.config.training.global_batch_size or 0)
    return timed(partial(take_steps, run, steps), 1, tokens)


def contestant(config: RunConfig, steps: int, warm_up: int) -> Round:
    """Build and warm up a variant, and return the function that runs one round of the variant. This function is called
    in the process of the variant."""
    choose_allocators(os.environ)
    return round_of(built(config, warm_up), steps)


def measure(
    config: RunConfig,
    args: argparse.Namespace,
    device: torch.device,
    name: str,
    note: Callable[[dict[str, Any]], object],
) -> dict[str, Any]:
    """Measure the upper limits, then rounds of steps, and then a single step with the profiler. Print each figure as
    soon as it is measured. `note` is called twice with the figures measured so far: before the planner runs, and before
    the profiler runs."""
    from megatron.training.metrics.summary import peak_tflops

    found = device_time.ceilings(config, device)
    on_gpu = device.type == "cuda"
    run = built(config, args.warm_up)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    one_round = round_of(run, args.steps)
    speed = Spread.of([one_round() for _ in range(args.rounds)])
    tflops = speed.median * flops_per_token(config.model) / 1e12
    peak = peak_tflops(config.logging, device, torch.bfloat16, linear_format(config.parallel))
    result: dict[str, Any] = {
        "config": args.config,
        "precision": args.precision,
        "layers": config.model.num_layers,
        "micro_batch_size": config.training.micro_batch_size,
        "micro_batches": config.training.num_microbatches or 1,
        "tokens_per_second": asdict(speed),
        "tflops": tflops,
        "mfu": tflops / peak if peak else None,
        "of_products": speed.median / device_time.ceiling_tokens(config, found),
        "planned": planned_bytes(config),
        "allocated": torch.cuda.max_memory_allocated(device) if on_gpu else None,
        "reserved": torch.cuda.max_memory_reserved(device) if on_gpu else None,
        "ceilings": [asdict(ceiling) for ceiling in found],
    }
    rows = [("", device.type, result)]
    for ceiling in found:
        print(f"{ceiling.name:<14}{ceiling.result}")
    say(gpu_page.training(rows))
    note(result)
    result["planner"] = planner_tflops(config, args.device, args.calibrated, name)
    say(gpu_page.planner(rows))
    note(result)
    groups = device_time.profiled(partial(take_steps, run, 1), on_gpu, args.trace)
    result["groups"] = [asdict(group) for group in groups]
    say(gpu_page.groups(device.type, result))
    return result


def say(lines: Iterable[str]) -> None:
    print("\n".join(lines), flush=True)


def planner_tflops(config: RunConfig, devices: Sequence[str], own: Path | None, name: str) -> dict[str, float]:
    """Return the predicted speed of a step, keyed by device file. A file is skipped, and the reason is printed, if it
    lacks a rate that the step needs, such as the fp8 rate. The file `own` is also skipped if it does not describe the
    device `name`."""
    from megatron.extensions.plan.planner.device_file import read_device
    from megatron.extensions.plan.planner.time.step_time import predict_step

    found = {}
    for path in [*devices, *([str(own)] if own is not None else [])]:
        try:
            device = read_device(path)
            if path == str(own) and device.name != name:
                raise ValueError(f"it describes {device.name}, and this device is {name}")
            found[path] = predict_step(config, 1, device).tflops
        except (ValueError, OSError, ImportError) as error:
            print(f"not predicted for {path}: {error}")
    return found


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", choices=SHAPES, required=True)
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    parser.add_argument("--fp8-format", default="hybrid")
    parser.add_argument("--fp8-recipe", default="delayed")
    parser.add_argument("--flags", default="", help="additional flags of pretrain_gpt.py, in quotes")
    parser.add_argument("--layers", type=positive, help="number of layers (default: the model's, or as many as fit)")


def model_flags(args: argparse.Namespace) -> str:
    """Return the pretrain_gpt.py flags that select the number format, followed by the additional flags in --flags."""
    return f"{PRECISIONS[args.precision].format(format=args.fp8_format, recipe=args.fp8_recipe)} {args.flags}"


def parser_of_args() -> argparse.ArgumentParser:
    parser = bench_parser(__doc__, 5, steps=(3, "of a round"))
    add_model_flags(parser)
    add = parser.add_argument
    add("--compare", action="append", default=[], metavar="FLAGS", help="also measure with these additional flags")
    add("--memory-share", type=float, default=0.80, help="fraction of free memory that the plan may fill")
    add("--warm-up", type=int, default=5, help="steps before the first round")
    add("--device", nargs="+", default=[], help="device files from which the planner predicts the step time")
    add(
        "--calibrated",
        type=Path,
        help="device file that tools/calibrate.py wrote; ignored if it describes another device",
    )
    add("--cpu", action="store_true", help="trial without a GPU, with --config tiny")
    add("--trace", type=Path, help="path of the profiler's trace")
    return parser


def chosen_device(parser: argparse.ArgumentParser, args: argparse.Namespace) -> torch.device:
    """Return the device for --cpu and --config; exit with an error if it is unavailable."""
    if args.cpu and args.config != "tiny":
        parser.error("--cpu is for --config tiny only: other models need a GPU")
    choose_allocators(os.environ)
    if not args.cpu and not torch.cuda.is_available():
        parser.error("no GPU found; --cpu --config tiny runs a trial without one")
    return torch.device("cpu" if args.cpu else "cuda")


def chosen_config(args: argparse.Namespace, room: int) -> tuple[RunConfig, str]:
    """Return the largest configuration that fits into `room` bytes, and the flags that all variants have in common.
    Raises ValueError if no configuration fits."""
    flags = f"{model_flags(args)} {'--cpu' if args.cpu else ''}"
    shape = SHAPES[args.config]
    return largest_that_fits(shape if args.layers is None else replace(shape, layers=args.layers), flags, room), flags


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of_args()
    args = parser.parse_args(argv)
    device = chosen_device(parser, args)
    free = CPU_BYTES if args.cpu else torch.cuda.mem_get_info(device)[0]
    facts: dict[str, Any] = machine("triton") | {"free_gib": free / 2**30}
    if not args.cpu:
        facts |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    print(f"{facts.get('gpu', 'no GPU')}, {gib(free)} GiB free")
    room = int(free * args.memory_share / (1 + len(args.compare)))
    try:
        config, flags = chosen_config(args, room)
        shape, of = SHAPES[args.config], (config.model.num_layers, config.training.micro_batch_size)
        variants = {"as it is": config} | {more: config_of(shape, *of, f"{flags} {more}") for more in args.compare}
    except ValueError as error:
        parser.error(str(error))

    def note(rows: Sequence[Any]) -> None:
        write_json(args.json, facts, rows, ended=False)

    if args.compare:
        contestants = [Contestant(name, contestant, (one, args.steps, args.warm_up)) for name, one in variants.items()]

        def rows_of(found: Found) -> list[Any]:
            return compared(found, lambda name: iter(["as it is"]))

        rows = rows_of(interleaved(contestants, args.rounds, note=lambda found: note(rows_of(found))))
        say_rows(rows)
    else:
        name = facts.get("gpu") or facts["cpu"]
        rows = [measure(config, args, device, name, lambda result: note([result]))]
    write_json(args.json, facts, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
