"""Train the same model under two layouts and report the first tensor that differs beyond rounding.

    python tools/compare_layouts.py --a "--tp 1" --b "--tp 2 --pp 2 --sequence-parallel" -- \
        --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 256 --lr 1e-3

Both sides run on the CPU of this machine, in gloo worlds of as many ranks as their flags need. Tensors are compared in
the order of computation, beginning with the initial weights. In each step, the order is: outputs of the embedding and
of every layer, the loss, gradients from the last layer to the first, the gradient norm, weights, and the optimizer
state. Replicas within a layout are also compared. The exit code is 0 if the layouts agree, 1 if they differ, 2 for an
invalid configuration, and 3 if training failed under a layout.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path

if not __package__:  # When this file runs as a script, the repository is not in the module path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "tools"

import torch
from torch import Tensor

from megatron.testing.snapshot import Snapshot, differences, kind_of, train_in_world
from megatron.training.config.arguments import parse_args
from megatron.training.config.prepare import tokenizer_vocabulary
from megatron.training.config.problem import any_text
from megatron.training.config.run_config import RunConfig
from megatron.training.config.saved_flags import with_saved_flags
from megatron.training.config.validation import resolve, validate

from .common import parted, refuse, run_tool, too_small, tool_parser

JUDGED = ("activation", "loss", "gradient", "grad_norm")
"""Kinds of tensors that are compared if a layout computes in a 16-bit format.

Weights and moments are not compared, because Adam divides each gradient by its magnitude. A gradient that consists only
of rounding errors, such as the gradient of a key bias, therefore changes its weight as much as any other gradient.
"""

TOLERANCES = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}
"""Largest relative difference after a few steps that a different summation order can explain, keyed by dtype. Only in
fp64 is an error in the program clearly larger than this difference. In lower precisions, Adam amplifies the rounding
errors of small gradients, because it divides each gradient by its magnitude."""


@dataclass(frozen=True)
class Side:
    """One of the two layouts to compare: its name, its additional flags, its complete configuration, and its number of
    ranks."""

    name: str
    flags: str
    config: RunConfig
    world_size: int


def main(argv: Sequence[str] | None = None) -> int:
    own, flags = parted(argv)
    args = build_parser().parse_args(_joined(own))
    check_own_flags(args)
    sides = build_sides(args, flags)
    print(f"flags of both: {shlex.join(common_flags(args, flags))}")
    try:
        snapshots = [run_side(side, args.steps) for side in sides]
    except (RuntimeError, TimeoutError, AssertionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    check_comparable(snapshots)
    tolerance = args.tolerance
    if tolerance is None:
        tolerance = max(TOLERANCES[side.config.parallel.params_dtype] for side in sides)
    if any(side.config.parallel.params_dtype in ("bfloat16", "float16") for side in sides):
        snapshots = [only_judged(snapshot) for snapshot in snapshots]
        print(f"in 16 bits, only {', '.join(JUDGED)} of the first step are compared: Adam amplifies rounding errors")
    return report(sides, snapshots, tolerance)


def only_judged(snapshot: Snapshot) -> Snapshot:
    """Return the initial weights, and those tensors of the first step whose kind is in `JUDGED`."""
    tensors = {
        key: value
        for key, value in snapshot.tensors.items()
        if key.startswith("initial ") or (key.startswith("step 1 ") and kind_of(key).split()[-1] in JUDGED)
    }
    return replace(snapshot, tensors=tensors)


def build_parser() -> argparse.ArgumentParser:
    parser = tool_parser(
        "Train under two layouts and name the first tensor that differs.",
        epilog="After --, give the flags that both layouts use, as for pretrain_gpt.py. The defaults are --fp64, "
        "--mock-data and as many training steps as --steps.",
        usage='%(prog)s --a "FLAGS" --b "FLAGS" [options] -- FLAGS',
    )
    add = parser.add_argument
    add("--a", type=any_text, required=True, metavar="FLAGS", help="flags that only layout a uses")
    add("--b", type=any_text, required=True, metavar="FLAGS", help="flags that only layout b uses")
    add("--steps", type=int, default=2, help="training steps (default: 2)")
    add("--world-a", type=int, metavar="N", help="ranks of side a (default: as few as the layout needs)")
    add("--world-b", type=int, metavar="N", help="ranks of side b")
    add("--tolerance", type=float, help="largest relative difference that counts as rounding (default: by precision)")
    return parser


def _joined(arguments: Sequence[str]) -> list[str]:
    """Join `--a X` to `--a=X`, because argparse would read a value that begins with dashes as a flag."""
    joined: list[str] = []
    words = iter(arguments)
    for word in words:
        joined.append(f"{word}={next(words, '')}" if word in ("--a", "--b") else word)
    return joined


def check_own_flags(args: argparse.Namespace) -> None:
    """Check the tool's own flags, which precede `--`. Raise ValueError with one line for each problem."""
    problems = too_small(args, steps=1, world_a=1, world_b=1, tolerance=0)
    for name, text in (("--a", args.a), ("--b", args.b)):
        try:
            shlex.split(text)
        except ValueError as error:
            problems.append(f"{name} {text}: cannot be split into flags: {error}; close the quotation mark")
    refuse(problems)


def build_sides(args: argparse.Namespace, flags: Sequence[str]) -> list[Side]:
    """Build the configurations of the two layouts to compare. Raises ValueError with one line for each problem with the
    flags of a layout."""
    common = common_flags(args, flags)
    batch = _batch_flags(args, common)
    sides, problems = [], []
    for name, own, world in (("a", args.a, args.world_a), ("b", args.b, args.world_b)):
        argv = (*common, *batch, *shlex.split(own))
        try:
            config, _ = with_saved_flags(parse_args(argv))
            world_size = world or config.parallel.smallest_world_size
            vocab_size = tokenizer_vocabulary(resolve(config, world_size))
            side = Side(name, own, resolve(config, world_size, vocab_size), world_size)
        except ValueError as error:
            problems += [f"--{name}: {line}" for line in str(error).split("\n")]
            continue
        if "--world-size" in argv:
            problems.append(f"--world-size: does not apply here; use --world-{name}")
        problems += [f"--{name}: {problem}" for problem in validate(side.config, side.world_size)]
        iterations = config.training.train_iters
        if iterations is not None and 0 < iterations < args.steps:
            problems.append(
                f"--{name}: --train-iters {iterations}: must be at least --steps {args.steps}; leave it out"
            )
        sides.append(side)
    if problems:
        raise ValueError("\n".join(dict.fromkeys(problems)))
    return sides


def common_flags(args: argparse.Namespace, flags: Sequence[str]) -> list[str]:
    """Return the flags that both layouts use. If neither side sets a flag such as --train-iters, a default that suits a
    comparison is added."""
    try:  # Flags that --a or --b sets get no default.
        config = parse_args([*flags, *shlex.split(args.a), *shlex.split(args.b)])
    except ValueError:
        config = parse_args(flags)
    added = ["--cpu", "--num-workers", "0", "--eval-iters", "0"]
    parallel = config.parallel
    data = config.data
    training = config.training
    if not (parallel.fp16 or parallel.bf16 or parallel.fp32 or parallel.fp64):
        added.append("--fp64")
    if not (data.data_path or data.per_split or data.mock_data or data.dataset_type):
        added.append("--mock-data")
    if not (training.train_iters or training.train_samples or training.train_tokens):
        added += ["--train-iters", str(args.steps)]
    return [*added, *flags]


def _batch_flags(args: argparse.Namespace, common: Sequence[str]) -> list[str]:
    """Return the flags for a global batch size that gives every data-parallel rank of both layouts at least two
    micro-batches. Return no flags if a layout sets the batch size."""
    rows, given = [], False
    for own, world in ((args.a, args.world_a), (args.b, args.world_b)):
        try:
            config = parse_args([*common, *shlex.split(own)])
        except ValueError:
            return []  # build_sides reports it
        given |= config.training.global_batch_size is not None
        replicas = (world or config.parallel.smallest_world_size) // max(1, config.parallel.model_parallel_size)
        rows.append(max(1, replicas * config.training.micro_batch_size))
    return [] if given else ["--global-batch-size", str(2 * lcm(*rows))]


def run_side(side: Side, steps: int) -> Snapshot:
    """Train under one of the two layouts, print the training time, and return the values to compare."""
    start = time.perf_counter()
    snapshot = train_in_world(side.world_size, side.config, steps, activations=True)
    ranks = f"{side.world_size} rank{'s' if side.world_size > 1 else ''}"
    seconds = time.perf_counter() - start
    length = f"{steps} step{'s' if steps > 1 else ''}"
    print(f"{side.name}: {side.flags or 'no flags of its own'}: {length} on {ranks} in {seconds:.1f} s", flush=True)
    return snapshot


def check_comparable(snapshots: Sequence[Snapshot]) -> None:
    """Raise ValueError if the two layouts have tensors with different names or shapes."""
    shapes = [{key: tuple(value.shape) for key, value in snapshot.tensors.items()} for snapshot in snapshots]
    problems = []
    for name, mine, other in (("a", *shapes), ("b", *reversed(shapes))):
        only = [key for key in mine if key not in other]
        if only:
            problems.append(f"--{name}: only this side has {only[0]} ({len(only)} such tensors); give both one model")
    for key in shapes[0]:
        if key in shapes[1] and shapes[0][key] != shapes[1][key]:
            problems.append(f"{key} is {shapes[0][key]} in a and {shapes[1][key]} in b; give both one model")
            break
    refuse(problems)


def report(sides: Sequence[Side], snapshots: Sequence[Snapshot], tolerance: float) -> int:
    """Print the first difference between the two layouts, or between replicas within one layout. Return the exit
    code."""
    a, b = snapshots
    largest, where = 0.0, ""
    for key, relative in differences(a, b):
        torn = [
            (side.name, s.differing_replicas[key])
            for side, s in zip(sides, snapshots, strict=True)
            if key in s.differing_replicas
        ]
        if torn or relative > tolerance:
            print(f"first difference: {key}")
            for name, message in torn:
                print(f"  within {name}: {message.removeprefix(f'{key}: ')}")
            if relative > tolerance:
                print_difference(key, a[key], b[key], relative, tolerance)
            return 1
        if relative > largest:
            largest, where = relative, key
    found = f"the largest relative difference is {largest:.2g}, of {where}" if where else "all are equal bit for bit"
    print(f"no difference in {len(a.tensors)} tensors (tolerance {tolerance:g}): {found}")
    return 0


def print_difference(key: str, a: Tensor, b: Tensor, relative: float, tolerance: float) -> None:
    """Print how two tensors differ, and where they differ most. Two elements differ if the magnitude of their
    difference exceeds `tolerance` times the largest magnitude in either tensor."""
    x, y = a.double(), b.double()
    gap = torch.where(torch.isfinite(x - y), (x - y).abs(), torch.inf).masked_fill(x == y, 0.0)
    finite = torch.cat([x.flatten(), y.flatten()])
    scale = finite[torch.isfinite(finite)].abs().amax().item() if torch.isfinite(finite).any() else 0.0
    place = tuple(int(i) for i in torch.unravel_index(gap.flatten().argmax(), a.shape)) if a.dim() else ()
    print(f"  relative difference {relative:.3g}, rounding explains {tolerance:g}")
    if place:
        axes = "sample, position, feature" if " activation " in key else "index"
        elements = int((gap > tolerance * scale).sum())
        print(f"  {elements:,} of {a.numel():,} elements differ; most at {axes} {list(place)}")
    print(f"  a {x[place].item()!r}")
    print(f"  b {y[place].item()!r}")


if __name__ == "__main__":
    run_tool(main)
