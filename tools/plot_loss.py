"""Plot the loss of one or more runs.

    python tools/plot_loss.py runs/a runs/b --output loss.png

Each run is given as its --save folder or its metrics.jsonl. A line shows the training loss of a run, and dots show its
validation loss. The label is the name of the run's folder. If a resumed run has logged an iteration twice, the later
record counts. Dashed lines mark the beginnings of data phases.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # When this file runs as a script, the repository is not in the module path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "tools"

from .common import refuse_picture, run_tool, tool_parser
from .pictures.drawing import Marks, Series, curves, write_picture
from .pictures.run_folder import labels_of, read_metrics

TRAIN_KEY = "lm_loss"
VALID_KEY = "valid_loss"


def draw(paths: list[Path], output: Path, log_scale: bool) -> str:
    """Write the picture and return a line that describes it."""
    series = []
    summary = []
    runs = [read_metrics(path) for path in paths]
    for number, (path, run, label) in enumerate(zip(paths, runs, labels_of(runs), strict=True)):
        losses, valid = run.values(TRAIN_KEY), run.values(VALID_KEY)
        if not losses:
            raise ValueError(f"{path} has no record with an iteration and {TRAIN_KEY}")
        series.append(Series(f"{label}, training", losses, colour=f"C{number}"))
        series.append(Series(f"{label}, validation", valid, dots=True, colour=f"C{number}"))
        summary.append(f"{path}: lm loss {losses[0][1]:.3f} -> {losses[-1][1]:.3f}, {len(valid)} validation points")
    marks = Marks(phases=runs[0].phases if all(run.phases == runs[0].phases for run in runs) else ())
    if (figure := curves("lm loss", "nats per token", series, marks=marks, size=(8, 4.5))) is None:
        raise ValueError("no loss is a finite number")
    if log_scale:
        from matplotlib.ticker import LogFormatter

        axes = figure.axes[0]
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(LogFormatter())  # formats labels as plain text, because formulas are turned off
        axes.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))
    write_picture(figure, output)
    return "\n".join(summary)


def main(argv: list[str] | None = None) -> int:
    parser = tool_parser(__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="--save folder of each run, or its metrics.jsonl")
    parser.add_argument("--output", type=Path, required=True, help="PNG file to write")
    parser.add_argument("--log-scale", action="store_true", help="logarithmic loss axis")
    args = parser.parse_args(argv)
    refuse_picture("--output", args.output)
    print(draw(args.runs, args.output, args.log_scale))
    return 0


if __name__ == "__main__":
    run_tool(main)
