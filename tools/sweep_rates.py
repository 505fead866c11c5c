"""Train each of several configurations with several learning rates, and find the best learning rate for each
configuration.

    python tools/sweep_rates.py --output runs/sweep --rates 1e-3 2e-3 4e-3 8e-3 --extend 3 \\
        --case "usual/64 --hidden-size 64" --case "usual/256 --hidden-size 256" -- --config base.yaml

A run is pretrain_gpt.py in a separate process with the flags after `--`, the flags of the case, --lr and --seed. The
result of a run is its last validation loss. Each run writes a JSON file, a log and metrics to the folder --output. If
the command is repeated, finished runs in the folder are skipped. A run that fails counts as diverged. To repeat the
run, delete its JSON file.

The best rate is at the minimum of the parabola through the lowest loss and its two neighbors, over log2(rate). With
--extend, if the lowest loss of a case is at its smallest or largest rate, the tool also trains with rates beyond that
end. The ratio of successive rates stays the same. Cases form a group if their names are equal up to the last slash,
such as usual/64 and usual/256. For each group, the last lines of the output show the range of the best learning rates.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

if not __package__:  # When this file runs as a script, the repository is not in the module path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "tools"

from megatron.core.fsync import whole_file
from megatron.extensions.plan.ladder.valid_loss import valid_loss
from megatron.training.reliability.run_status import ExitCode

from .common import parted, refuse, refuse_unwritable, run_tool, too_small, tool_parser

PROGRAM = Path(__file__).resolve().parents[1] / "pretrain_gpt.py"
Curve = Mapping[float, float]
"""Loss by learning rate; infinite for diverged runs."""


@dataclass(frozen=True)
class Best:
    """Best learning rate of a case, and the loss at that rate according to the fitted parabola."""

    rate: float
    loss: float


def best_rate(curve: Curve) -> Best | None:
    """Return the minimum of the parabola through the lowest loss and its two neighbors; None if a neighbor is
    missing."""
    rates = sorted(curve)
    lowest = rates.index(min(rates, key=lambda rate: curve[rate]))
    if not 0 < lowest < len(rates) - 1:
        return None
    near = rates[lowest - 1 : lowest + 2]
    (a, x), (b, y), (c, z) = ((math.log2(rate), curve[rate]) for rate in near)
    if not all(map(math.isfinite, (x, y, z))):
        return Best(near[1], y) if math.isfinite(y) else None
    left, right = (y - x) / (b - a), (z - y) / (c - b)
    bend = (right - left) / (c - a)
    if bend <= 0:
        return Best(near[1], y)
    at = (a + b) / 2 - left / (2 * bend)
    return Best(2**at, x + left * (at - a) + bend * (at - a) * (at - b))


def next_rate(curve: Curve) -> float | None:
    """Return the next rate to try if the loss is lowest at the smallest or at the largest rate so far: a rate beyond
    that end. Otherwise, return None."""
    rates = sorted(curve)
    lowest = rates.index(min(rates, key=lambda rate: curve[rate]))
    if lowest == 0:
        return rates[0] * rates[0] / rates[1]
    if lowest == len(rates) - 1:
        return rates[-1] * rates[-1] / rates[-2]
    return None


@dataclass(frozen=True)
class Sweep:
    """Training runs of a learning-rate sweep. The result of each run is stored in a JSON file in `folder`."""

    folder: Path
    flags: Sequence[str]
    """Flags that all runs of the sweep have in common."""

    seeds: Sequence[int]

    def loss(self, case: str, flags: Sequence[str], rate: float) -> float:
        """Return the mean loss over all seeds. Runs whose results are not in the folder are trained first."""
        return fmean(self.run(case, flags, rate, seed) for seed in self.seeds)

    def run(self, case: str, flags: Sequence[str], rate: float, seed: int) -> float:
        """Return the last validation loss of a run. Raises ValueError if the run's flags are refused, if the run is
        stopped, or if the folder already contains a result of this run with different flags."""
        stem = self.folder / case / f"lr_{rate:.6g}_seed_{seed}"
        result, log, metrics = (Path(f"{stem}.{suffix}") for suffix in ("json", "log", "jsonl"))
        command = [*self.flags, *flags, "--lr", f"{rate:.6g}", "--seed", str(seed)]
        if not result.is_file():
            stem.parent.mkdir(parents=True, exist_ok=True)
            metrics.unlink(missing_ok=True)
            code = self._train([*command, "--metrics-file", str(metrics)], log)
            loss = _last_loss(metrics, log) if code == ExitCode.DONE else None
            text = json.dumps({"case": case, "rate": rate, "seed": seed, "loss": loss, "flags": command}, indent=1)
            with whole_file(result) as file:
                file.write_text(text + "\n")
            print(f"{case} lr {rate:.4g} seed {seed}: {'diverged' if loss is None else f'{loss:.4f}'}", flush=True)
        found = json.loads(result.read_text())
        if found["flags"] != command:
            raise ValueError(f"{result}: belongs to a run with other flags; choose another --output, or delete it")
        return math.inf if found["loss"] is None else float(found["loss"])

    def _train(self, flags: Sequence[str], log: Path) -> int:
        """Run pretrain_gpt.py and return its exit code."""
        with log.open("w") as out:
            code = subprocess.run([sys.executable, str(PROGRAM), *flags], stdout=out, stderr=out).returncode
        if code not in (ExitCode.DONE, ExitCode.FAILED):
            last = "\n".join(log.read_text(errors="replace").splitlines()[-3:])
            raise ValueError(f"{log}: the run ended with exit code {code}\n{last}")
        return code


def _last_loss(metrics: Path, log: Path) -> float | None:
    """Return the last validation loss; None if it is not finite. Raises ValueError if there is no validation loss."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    losses = [loss for record in records if (loss := valid_loss(record)) is not None]
    if not losses:
        raise ValueError(f"{log}: the run has no validation loss; set --eval-iters and --eval-interval")
    return losses[-1] if math.isfinite(losses[-1]) else None


def table(curves: Mapping[str, Curve]) -> list[str]:
    """Return the lines of a table: for each case, the loss at each learning rate and the best rate; for each group, a
    summary."""
    rates = sorted({rate for curve in curves.values() for rate in curve})
    width = max(len(case) for case in curves)
    lines = [" ".join([" " * width, *(f"{rate:>9.3g}" for rate in rates), " best rate", "    loss"])]
    groups: dict[str, list[float | None]] = {}
    for case, curve in curves.items():
        best = best_rate(curve)
        groups.setdefault(case.rpartition("/")[0] or "all", []).append(best and best.rate)
        losses = [f"{curve[rate]:9.4f}" if rate in curve else " " * 9 for rate in rates]
        end = f"{best.rate:10.3g} {best.loss:8.4f}" if best else "  not between two rates"
        lines.append(" ".join([f"{case:{width}}", *losses, end]))
    for group, found in groups.items():
        known = [rate for rate in found if rate is not None]
        if len(known) < len(found):
            lines.append(f"{group}: best rates are not all known; give more --rates, or --extend")
        elif len(known) > 1:
            lines.append(f"{group}: best rates within a factor {max(known) / min(known):.2f}")
    return lines


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = tool_parser(__doc__)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="folder of the results")
    text = "name and flags of a configuration, quoted as one argument; may be given more than once"
    add("--case", action="append", required=True, metavar="'NAME FLAGS'", type=shlex.split, help=text)
    add("--rates", type=float, nargs="+", required=True, metavar="LR", help="learning rates of each case")
    add("--extend", type=int, default=0, metavar="N", help="maximum number of rates to add to each case (default: 0)")
    add("--seeds", type=int, nargs="+", default=[1234], help="seeds for each case and rate (default: 1234)")
    args = parser.parse_args(argv)
    names, rates = [case[0] for case in args.case], {*args.rates}
    problems = too_small(args, extend=0)
    problems += [f"--case {name}: is given more than once" for name in {*names} if names.count(name) > 1]
    if len(rates) < max(2, len(args.rates)) or min(rates) <= 0:
        problems.append("--rates: give two or more different rates above 0")
    refuse(problems)
    refuse_unwritable("--output", args.output / "table")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    own, flags = parted(argv)
    args = parse(own)
    sweep = Sweep(args.output, flags, args.seeds)
    curves: dict[str, Curve] = {}
    for name, *case in args.case:
        curve = {rate: sweep.loss(name, case, rate) for rate in sorted(args.rates)}
        for _ in range(args.extend):
            if (rate := next_rate(curve)) is not None:
                curve[rate] = sweep.loss(name, case, rate)
        curves[name] = curve
    print("\n".join(table(curves)))
    return 0


if __name__ == "__main__":
    run_tool(main)
