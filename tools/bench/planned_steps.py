"""Predict the step times of the models in tools/bench/gpu.py: first with all kernels and mechanisms of this revision,
and then with each of them turned off in turn.

    python tools/bench/planned_steps.py
    python tools/bench/planned_steps.py --only sparse --device h100 --json steps.json

Nothing is executed: `predict_step` adds up the predicted times of the operations in a step. A kernel is turned off by
adding it to `megatron.core.kernels.LEFT_OUT`, as a run does if it finds that the kernel is wrong or slow. Kernels that
change a step by less than 0.1 % are not listed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench.side_by_side import bench_parser, machine, write_json

LAYERS = {"llama-8b-layers": 8}
"""Number of layers of models that tools/bench/gpu.py builds with as many layers as fit, keyed by model."""

PLANS = {
    "sparse": ("sparse", "--bf16"),
    "experts": ("experts", "--bf16"),
    "experts fp8": ("experts", "--bf16 --fp8-format hybrid --fp8-recipe delayed"),
    "mamba2": ("mamba2", "--bf16"),
    "llama-8b-layers fp8": ("llama-8b-layers", "--bf16 --fp8-format hybrid --fp8-recipe delayed"),
}
"""Dict from the name of each group of rows to the model in tools/bench/gpu.py and its additional flags."""

FLAGS = ("--no-fusions", "--no-compile", "--deterministic-mode", "--attention-backend fp8")
"""Flags whose effect on the step time is predicted. Each flag turns a mechanism, such as fusions, off or on."""

LEAST = 1e-3
"""A mechanism is listed only if it changes the step time by at least this fraction."""


@dataclass(frozen=True)
class Row:
    model: str
    without: str
    """Name of the mechanism that is turned off, or flag that is added; empty if nothing is changed."""

    milliseconds: float
    tokens_per_second: float
    tflops: float
    parts: dict[str, float]
    """Milliseconds of each part of the step."""

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value:,.0f}" for name, value in self.parts.items())
        figures = f"{self.milliseconds:>9,.0f}{self.tokens_per_second:>10,.0f}{self.tflops:>9,.0f}"
        return f"{self.model:<22}{self.without:<32}{figures}  {parts}"


HEAD = f"{'model':<22}{'without, or with a flag':<32}{'ms':>9}{'tokens/s':>10}{'TFLOP/s':>9}  ms by part"


def planned(model: str, device: str, more: str = "", left_out: Sequence[str] = ()) -> Row:
    """Predict the time of a training step and its parts. Raises ValueError if the flags are invalid."""
    from megatron.core.kernels import LEFT_OUT
    from megatron.extensions.plan.planner.device_file import read_device
    from megatron.extensions.plan.planner.time.step_time import predict_step
    from tools.bench.gpu import SHAPES, config_of

    name, flags = PLANS[model]
    shape = SHAPES[name]
    config = config_of(shape, shape.layers or LAYERS[name], 1, f"{flags} {more}")
    before = set(LEFT_OUT)
    LEFT_OUT.update(left_out)
    try:
        step = predict_step(config, 1, read_device(device))
    finally:
        LEFT_OUT.intersection_update(before)
    parts = {subject: 1e3 * seconds for subject, seconds in step.parts.items() if seconds >= 5e-4}
    label = more or ", ".join(left_out)
    return Row(model, label, 1e3 * step.seconds, step.tokens_per_second, step.tflops, parts)


def variants(model: str, device: str) -> Iterator[Row]:
    """Yield the predicted step of a model, first without changes, and then with each kernel or mechanism turned off."""
    from megatron.core.kernels import KERNELS
    from megatron.extensions.plan.planner.time.expert_products import PLANNED
    from megatron.extensions.speed.fusions.kernel_choice import planned_kernels

    first = planned(model, device)
    yield first

    def differs(row: Row) -> bool:
        return abs(row.milliseconds / first.milliseconds - 1) >= LEAST

    own = {*planned_kernels(), *PLANNED}
    without_any = planned(model, device, left_out=tuple(own))
    changed = list[str]()
    for name in KERNELS if differs(without_any) else ():
        if name in own and differs(row := planned(model, device, left_out=(name,))):
            changed.append(name)
            yield row
    if len(changed) > 1:
        yield replace(without_any, without="all of these")
    for flag in FLAGS:
        try:
            row = planned(model, device, flag)
        except ValueError:  # The model does not support this flag.
            continue
        if differs(row):
            yield row


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=PLANS, default=list(PLANS), help="models")
    parser.add_argument("--device", default="h200", help="name or path of a device file")
    args = parser.parse_args(argv)
    print(HEAD)
    rows = list[Row]()
    for model in args.only:
        for row in variants(model, args.device):
            rows.append(row)
            print(row, flush=True)
    write_json(args.json, machine(), [asdict(row) for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
