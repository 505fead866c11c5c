"""Check that the sizes of activations and of their updates do not depend on a model's width and depth.

    python tools/coordinate_check.py --widths 64 128 256 --depths 2 4 8 --output check.png -- \\
        --use-mup --mup-base-hidden-size 64 --mup-base-num-layers 2 --mup-base-head-dim 16

The tool trains a small model of each size for some steps on one batch, on CPU, with the flags of pretrain_gpt.py after
`--`. After each step, the tool measures the root mean square of the batch's activations, and the root mean square of
their change since initialization. If both root mean squares are independent of width and depth, a learning rate that
was tuned on a small model also suits a large model (appendix D.1 of arXiv 2203.03466). The tool fits a line to
log2(root mean square) over log2(width), or over log2(depth), and prints its slope. A slope of 1 means that the size
doubles when the width doubles.

A model of a different width keeps the number of channels per head. All other widths, such as MLP widths, are scaled in
proportion, except those in --mup-base-widths. The exit code is 0 if every slope is within --tolerance, 1 if a slope
exceeds --tolerance or a loss is not finite, and 2 for wrong flags.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # When this file runs as a script, the repository is not in the module path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "tools"

from megatron.extensions.optim.mup.widths import scaled_widths
from megatron.training.config.arguments import parse_args
from megatron.training.config.flags import with_named
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve, validate

from .common import add_extension_flag, parted, refuse, refuse_picture, run_tool, too_small, tool_parser

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor, nn

    from megatron.core.batch import Batch
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.training.run import TrainingRun

MODEL = (
    "--cpu --mock-data --num-workers 0 --eval-iters 0 --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
    "--seq-length 16 --vocab-size 32 --make-vocab-size-divisible-by 32 --global-batch-size 4 --micro-batch-size 4 "
    "--train-iters 1000 --lr 0.01 --lr-decay-style constant --weight-decay 0 --clip-grad 0 --attention-dropout 0 "
    "--hidden-dropout 0 --untie-embeddings-and-output-weights --init-method-std 0.03 --position-embedding-type rope "
    "--normalization RMSNorm --disable-bias-linear"
)
"""Default flags of the model. Flags after `--` on the command line override them."""

PARTS = ("embedding", "attention", "mlp", "stream", "logits")
"""Parts of the model whose outputs are measured: the embedding, the attention and MLP sublayers (averaged over layers),
the last layer ("stream"), and the output layer."""

Sizes = dict[str, list[float]]
"""For each part of the model (`PARTS`), the root mean squares of its activations, or of their change, after 0, 1, 2,
... steps."""


@dataclass(frozen=True)
class Measured:
    """Root mean squares of activations and updates that were measured in one model."""

    activations: Sizes
    updates: Sizes
    """Root mean square of the change of activations since initialization; 0 for parts of the model that are not
    trained."""


@dataclass(frozen=True)
class Axis:
    """Series of models that differ only in width, or only in depth."""

    name: str
    sizes: Sequence[int]
    found: Sequence[Measured]

    def slopes(self, steps: int) -> Iterator[tuple[str, str, float]]:
        """For each part of the model, yield the tuples (part, "activation", slope) and (part, "update", slope). The
        slope shows how the root mean square after `steps` steps grows with the model's size; see `slope`."""
        for part in PARTS:
            for kind in ("activation", "update"):
                values = [getattr(each, f"{kind}s")[part][steps] for each in self.found]
                yield part, kind, slope(self.sizes, values)


def slope(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Return the least-squares slope of log2(value) over log2(size); 0 if no value changes."""
    if not any(values):
        return 0.0
    if not all(0 < value < math.inf for value in values):
        return math.inf
    points = [(math.log2(size), math.log2(value)) for size, value in zip(sizes, values, strict=True)]
    x, y = (sum(column) / len(points) for column in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def config_of(flags: Sequence[str], **sizes: int) -> RunConfig:
    """Return the complete configuration of a model with the given sizes. Raises ValueError with one line for each
    problem with the flags."""
    config = parse_args([*MODEL.split(), *flags])
    if (width := sizes.get("hidden_size")) is not None:
        config = with_named(config, {name: int(value) for name, value in scaled_widths(config, width).items()})
    config = with_named(config, dict(sizes))
    refuse([str(problem) for problem in validate(config, 1) if not problem.harmless])
    return resolve(config, 1)


def measured(config: RunConfig, steps: int) -> Measured:
    """Train a model in a separate process, and return the measured root mean squares."""
    from megatron.testing.local_world import run_world

    (found,) = run_world(1, _train, config, steps)
    return found


def _train(rank: int, world_size: int, config: RunConfig, steps: int) -> Measured:
    from megatron.testing.local_run import local_run
    from megatron.training.train_step import train_step

    activations: Sizes = {part: [] for part in PARTS}
    updates: Sizes = {part: [] for part in PARTS}
    with redirect_stdout(StringIO()), local_run(config, rank, world_size) as run:
        first: dict[str, Tensor] = {}
        batch = run.data.read_batches(run.progress.next_step(run.batch_sizes))[0]
        for step in range(steps + 1):
            if step:
                train_step(run)
                run.progress.consumed_samples = 0  # train on the same batch in every step
            now = _activations(run, batch)
            first = first or now
            for part in PARTS:
                activations[part].append(_size(now[part]))
                updates[part].append(_size(now[part] - first[part]))
    return Measured(activations, updates)


def _size(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def _activations(run: TrainingRun, batch: Batch) -> dict[str, Tensor]:
    """Run a forward pass without training, and return the activations of each part of the model."""
    import torch

    (model,) = run.stages.values()
    found: dict[str, list[Tensor]] = {part: [] for part in PARTS}

    def note(part: str, module: nn.Module, args: object, output: Tensor) -> None:
        found[part].append(output.detach().clone())

    with ExitStack() as hooks, torch.no_grad():
        for part, module in _modules(model):
            hooks.callback(module.register_forward_hook(partial(note, part)).remove)
        model.eval()
        model(None, batch)
        model.train()
    return {part: torch.stack(outputs) for part, outputs in found.items()}


def _modules(model: GPTModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module whose output is measured, together with the name of its part of the model."""
    assert model.embedding is not None and model.output_layer is not None
    yield "embedding", model.embedding
    layers = list(model.named_layers().values())
    for layer in layers:
        for part, name in (("attention", "self_attention"), ("mlp", "mlp")):
            if (module := getattr(layer, name, None)) is not None:
                yield part, module
    yield "stream", layers[-1]
    yield "logits", model.output_layer


def verdict(axis: Axis, steps: int, tolerance: float) -> tuple[list[str], bool]:
    """Return the lines of a table of slopes, and True if every slope is within the tolerance. A negative slope is
    permitted for logits, because their initial values shrink with the model's size."""
    lines, flat = [f"{axis.name}s {' '.join(map(str, axis.sizes))}: slopes after {steps} steps"], True
    for part, kind, found in axis.slopes(steps):
        may_shrink = part == "logits" and kind == "activation"
        good = found <= tolerance and (may_shrink or found >= -tolerance)
        flat = flat and good
        lines.append(f"  {part:10} {kind:10} {found:+7.2f}{'' if good else '  not flat'}")
    return lines, flat


def picture(axes: Sequence[Axis], steps: int) -> Figure:
    """Draw the root mean squares of activations (top row) and updates (bottom row) after the last step. Each column
    shows one axis: width or depth."""
    from .pictures.drawing import new_figure

    figure = new_figure(4.6 * len(axes), 6)
    panels = figure.subplots(2, len(axes), squeeze=False)
    for column, axis in enumerate(axes):
        for row, kind in enumerate(("activation", "update")):
            panel = panels[row][column]
            for part in PARTS:
                values = [getattr(each, f"{kind}s")[part][steps] for each in axis.found]
                panel.plot(axis.sizes, values, marker="o", markersize=3, linewidth=1.2, label=part)
            panel.set_xscale("log", base=2)
            panel.set_yscale("log", base=2)
            panel.set_xticks(axis.sizes, [str(size) for size in axis.sizes])
            what = "activations" if kind == "activation" else "their change"
            panel.set(title=f"root mean square of {what}, step {steps}", xlabel=axis.name)
            panel.grid(alpha=0.3)
    panels[0][0].legend(fontsize="small", frameon=False)
    return figure


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = tool_parser(__doc__)
    add_extension_flag(parser, argv)
    parser.add_argument("--widths", type=int, nargs="+", metavar="N", help="values of --hidden-size, at least two")
    parser.add_argument("--depths", type=int, nargs="+", metavar="N", help="values of --num-layers, at least two")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="training steps (default: 8)")
    parser.add_argument("--tolerance", type=float, default=0.2, help="largest slope that counts as flat (default: 0.2)")
    parser.add_argument("--output", type=Path, metavar="PICTURE", help="PNG file to write")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    own, flags = parted(argv)
    args = build_parser(own).parse_args(own)
    wanted = {"width": args.widths, "depth": args.depths}
    problems = too_small(args, steps=1, tolerance=0)
    problems += [
        f"--{name}s {sizes[0]}: give at least two" for name, sizes in wanted.items() if sizes and len(sizes) < 2
    ]
    problems += [] if any(wanted.values()) else ["--widths: give two or more, or --depths"]
    refuse(problems)
    refuse_picture("--output", args.output)
    fields = {"width": "hidden_size", "depth": "num_layers"}
    plans = {
        name: [config_of(flags, **{fields[name]: size}) for size in sizes] for name, sizes in wanted.items() if sizes
    }
    axes, flat = [], True
    for name, configs in plans.items():
        axis = Axis(name, wanted[name], [measured(config, args.steps) for config in configs])
        lines, good = verdict(axis, args.steps, args.tolerance)
        print("\n".join(lines), flush=True)
        axes.append(axis)
        flat = flat and good
    if args.output is not None:
        from .pictures.drawing import write_picture

        write_picture(picture(axes, args.steps), args.output)
    sizes = " and ".join(plans)
    print(f"flat: sizes do not depend on the {sizes}" if flat else f"not flat: sizes depend on the {sizes}")
    return 0 if flat else 1


if __name__ == "__main__":
    run_tool(main)
