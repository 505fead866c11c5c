"""Train small models, and predict the loss and the best learning rate of a large one.

    python tools/ladder.py --output runs/ladder --widths 256 384 512 768 -- --config large.yaml

The flags after `--` describe the large run, the target. A rung is the same run with a different width and depth. A rung
has the target's head size and ratio of tokens to parameters. All other widths are scaled in proportion. A rung trains
for fewer steps than the target, and its learning-rate schedule is shortened by the same factor. Rungs are trained one
after another, each in OUTPUT/NAME. A finished rung is not trained again, and an interrupted rung resumes from its
checkpoint. --sbatch writes a SLURM array instead.

Then the scaling law L(N, D) = E + A N^-a + B D^-b is fitted to the last validation losses, where N is the number of
parameters and D the number of tokens. The tool writes two files to OUTPUT. rungs.csv has one line per rung. ladder.json
contains the predicted loss; pass it to the large run with --expect. The exit code is 0 on success, 1 if a rung failed,
and 2 for wrong flags or too few finished rungs.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:  # When this file runs as a script, the repository is not in the module path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "tools"

from megatron.core.fsync import whole_file
from megatron.extensions.plan.ladder.best_rate import BestRate
from megatron.extensions.plan.ladder.expectation import PREDICTION
from megatron.extensions.plan.ladder.job_script import RUNG, SCRIPT, job_script
from megatron.extensions.plan.ladder.outcome import TABLE, Outcome, outcome, outcomes, table

from .common import add_extension_flag, parted, refuse, refuse_picture, run_tool, too_small, tool_parser
from .sweep_rates import best_rate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from megatron.extensions.plan.ladder.rungs import Ladder, Rung

PROGRAM = Path(__file__).resolve().parents[1] / "pretrain_gpt.py"


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = tool_parser(__doc__)
    add_extension_flag(parser, argv)
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="FOLDER", help="folder of the ladder")
    add("--widths", type=int, nargs="+", default=[], metavar="N", help="widths of the rungs (default: the target's)")
    add("--depths", type=int, nargs="+", default=[], metavar="N", help="depths of the rungs (default: the target's)")
    text = "tokens per parameter, one or more values for each size (default: the target's)"
    add("--tokens-per-parameter", type=float, nargs="+", default=[], metavar="R", help=text)
    add("--rates", type=float, nargs="+", default=[], metavar="LR", help="learning rates of each rung (default: --lr)")
    text = "train rungs of these widths with --lr and --rates, and others only with --lr (default: --rates for all)"
    add("--sweep-widths", type=int, nargs="+", default=[], metavar="N", help=text)
    add("--evaluations", type=int, default=20, metavar="N", help="validations of each run (default: 20)")
    text = 'command that launches a rung, such as "torchrun --nproc-per-node 8" (default: the Python interpreter)'
    add("--launcher", type=shlex.split, default=[sys.executable], metavar="COMMAND", help=text)
    text = f"do not train; write {SCRIPT}, a SLURM job array with one task for each rung"
    add("--sbatch", action="store_true", help=text)
    text = "option of sbatch, such as --sbatch-option=--time=2:00:00; may be given more than once"
    add("--sbatch-option", action="append", default=[], metavar="OPTION", help=text)
    add("--print", action="store_true", help="only print the commands or, with --sbatch, the script")
    add("--rung", type=int, metavar="N", help="train only rung N, counted from 0, as a task of the array does")
    add("--fit", action="store_true", help="do not train; predict the loss from the finished rungs")
    add("--picture", type=Path, metavar="FILE", help="file for a picture of the law and the curves")
    return parser


def train(ladder: Ladder, rung: Rung, args: argparse.Namespace, flags: Sequence[str]) -> int:
    """Train a rung, or the remaining part of an interrupted rung. Return the exit code of the training program."""
    if outcome(ladder, rung, args.output).done == 1:
        return 0
    folder = args.output / rung.name
    folder.mkdir(parents=True, exist_ok=True)
    command = rung_command(ladder, rung, args, flags)
    with open(folder / "screen.log", "a", encoding="utf-8") as screen:
        process = subprocess.Popen(command, stdout=screen, stderr=subprocess.STDOUT)
        try:
            return process.wait()
        finally:  # If this tool is terminated, wait until the rung has saved a checkpoint.
            if process.poll() is None:
                process.terminate()
                process.wait()


def rung_command(ladder: Ladder, rung: Rung, args: argparse.Namespace, flags: Sequence[str]) -> list[str]:
    return [*args.launcher, str(PROGRAM), *extended(args, flags), *ladder.flags(rung, args.output)]


def extended(args: argparse.Namespace, flags: Sequence[str]) -> list[str]:
    """Prepend an --extension flag to `flags` for each extension that was passed to this tool."""
    return [*(word for name in args.extension for word in ("--extension", name)), *flags]


def train_all(ladder: Ladder, args: argparse.Namespace, flags: Sequence[str]) -> list[str]:
    """Train the rungs one after another, smallest first. Return one line for each rung that failed."""
    failed = []
    for number, rung in enumerate(ladder.rungs):
        print(f"rung {number + 1} of {len(ladder.rungs)}: {rung.name}", flush=True)
        code = train(ladder, rung, args, flags)
        found = outcome(ladder, rung, args.output)
        if found.diverged:
            print("  diverged", flush=True)
        elif found.loss is None:
            failed.append(f"rung {rung.name} ended with code {code}: see {args.output / rung.name / 'screen.log'}")
            print(failed[-1], flush=True)
        else:
            print(f"  validation loss {found.loss:.4f}", flush=True)
        write(args.output / TABLE, table(outcomes(ladder, args.output)))
    return failed


def no_law(ladder: Ladder) -> list[str]:
    """Return the reasons why no scaling law can be fitted to this ladder, such as too few model sizes or missing
    scipy."""
    problems = []
    if (sizes := len({rung.size for rung in ladder.rungs})) < 3:
        rule = f"make runs of {sizes} size{'s' * (sizes > 1)}, and a law needs 3"
        problems.append(f"--widths, --depths and --tokens-per-parameter {rule}; add more, or train one with --rung")
    if find_spec("scipy") is None:
        problems.append("fitting a law needs scipy: pip install 'paritrain[ladder]'")
    return problems


def write(path: Path, text: str) -> None:
    """Write a file atomically, so that readers never see a partial file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        Path(file).write_text(text, encoding="utf-8")


def array_script(ladder: Ladder, args: argparse.Namespace, argv: Sequence[str], flags: Sequence[str]) -> str:
    """Return the job-array script that --sbatch writes. Each task of the job array runs this tool with the same flags,
    and trains the rung that --rung selects."""
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--rung",
        RUNG,
        *(word for word in argv if word != "--print"),
    ]
    return job_script(args.output, len(ladder.rungs), args.sbatch_option, [*command, "--", *flags])


def swept_rates(found: Sequence[Outcome]) -> list[BestRate]:
    """Return the best learning rate of each model size for which runs with at least three learning rates have finished.
    Diverged runs count as the worst loss."""
    rates = []
    for size in dict.fromkeys(each.rung.size for each in found):
        runs = [each for each in found if each.rung.size == size]
        curve = {each.rung.rate: each.loss for each in runs if each.loss is not None}
        all_rates = curve | {each.rung.rate: math.inf for each in runs if each.diverged}
        if curve and len(all_rates) >= 3:
            best = best_rate(all_rates)
            rate = min(curve, key=lambda rate: curve[rate]) if best is None else best.rate
            rates.append(BestRate(size.parameters, rate, bracketed=best is not None))
    return rates


def report(ladder: Ladder, found: Sequence[Outcome], args: argparse.Namespace) -> None:
    """Predict the loss of the target. Print the prediction, and write ladder.json, rungs.csv and the picture."""
    from megatron.extensions.plan.ladder.prediction import lines, predict

    prediction = predict(ladder, found, swept_rates(found))
    write(args.output / PREDICTION, json.dumps(prediction, indent=1) + "\n")
    write(args.output / TABLE, table(found))
    print("\n".join(lines(prediction)))
    print(f"wrote {args.output / PREDICTION} and {args.output / TABLE}")
    if args.picture is not None:
        from .pictures.drawing import write_picture

        write_picture(picture(prediction, found), args.picture)


def picture(prediction: dict[str, Any], found: Sequence[Outcome]) -> Figure:
    """Draw two charts. The left chart shows final losses over compute, including the predicted loss of the target. The
    right chart shows loss curves over tokens."""
    from matplotlib.ticker import LogFormatter

    from .pictures.drawing import new_figure

    figure = new_figure(9.6, 3.8)
    panels = figure.subplots(1, 2)
    finished = [each for each in found if each.loss is not None]
    panels[0].plot([each.rung.size.compute for each in finished], [each.loss for each in finished], "o", label="rungs")
    target, loss = prediction["target"], prediction["predicted"]
    compute = 6 * target["parameters"] * target["tokens"]
    bars = [[loss["loss"] - loss["low"]], [loss["high"] - loss["loss"]]]
    panels[0].errorbar([compute], [loss["loss"]], bars, fmt="s", capsize=4, label="predicted")
    if "B" not in prediction["law"]:
        floor, scale, exponent = (prediction["law"][name][0] for name in ("E", "A", "a"))
        first = min(each.rung.size.compute for each in finished)
        steps = [first * (compute / first) ** (number / 50) for number in range(51)]
        panels[0].plot(steps, [floor + scale * step**-exponent for step in steps], "k--", linewidth=1, label="law")
    panels[0].set(title="last validation loss", xlabel="compute 6 N D", xscale="log")
    for each in found:
        points = sorted(each.losses.items())
        tokens = [each.rung.size.tokens * number / each.evaluations for number, _ in points]
        panels[1].plot(tokens, [value for _, value in points], linewidth=1, label=each.rung.name)
    curve = prediction["curve"]
    tokens = [point["tokens"] for point in curve]
    panels[1].plot(tokens, [point["loss"] for point in curve], "k--", linewidth=1.2, label="predicted")
    panels[1].fill_between(tokens, *([point[side] for point in curve] for side in ("low", "high")), alpha=0.2)
    panels[1].set(title="validation loss", xlabel="tokens", xscale="log")
    for panel in panels:
        panel.xaxis.set_major_formatter(LogFormatter())  # formats labels as plain text, because formulas are turned off
        panel.xaxis.set_minor_formatter(LogFormatter(labelOnlyBase=True))
        panel.grid(alpha=0.3)
        panel.legend(fontsize="x-small", frameon=False)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    from megatron.extensions.plan.ladder.rungs import Wanted, build_ladder
    from megatron.extensions.plan.ladder.same_run import runs_of_other_flags

    own, flags = parted(argv)
    args = build_parser(own).parse_args(own)
    refuse(too_small(args, evaluations=1, rung=0))
    refuse_picture("--picture", args.picture)
    wanted = Wanted(
        args.widths, args.depths, args.tokens_per_parameter, args.rates, args.sweep_widths, args.evaluations
    )
    ladder = build_ladder(flags, wanted)
    if args.rung is not None:
        if args.rung >= len(ladder.rungs):
            raise ValueError(
                f"--rung {args.rung}: must be from 0 to {len(ladder.rungs) - 1}, the last rung of the ladder"
            )
        rung = ladder.rungs[args.rung]
        refuse(runs_of_other_flags(ladder, [rung], extended(args, flags), args.output))
        return train(ladder, rung, args, flags)
    if args.sbatch:
        script = array_script(ladder, args, own, flags)
        if args.print:
            print(script, end="")
            return 0
        write(args.output / SCRIPT, script)
        print(f"wrote {args.output / SCRIPT}: submit it with sbatch, then run this command with --fit instead")
        return 0
    if args.print:
        print("\n".join(shlex.join(rung_command(ladder, rung, args, flags)) for rung in ladder.rungs))
        return 0
    if not args.fit:
        refuse(no_law(ladder))
    refuse(runs_of_other_flags(ladder, ladder.rungs, extended(args, flags), args.output))
    failed = [] if args.fit else train_all(ladder, args, flags)
    report(ladder, outcomes(ladder, args.output), args)
    return 1 if failed else 0


if __name__ == "__main__":
    run_tool(main)
