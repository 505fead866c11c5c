"""Plot the loss of one or more runs from their metrics.jsonl.

    python tools/plot_loss.py runs/a/metrics.jsonl runs/b/metrics.jsonl --output loss.png

Each file gives one line of training loss and dots of validation loss. If a resumed run logged an iteration twice, the
later record counts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

if not __package__:  # run as a file of a clone
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "tools"
from .common import PICTURES, refuse_picture, run_tool

TRAIN_KEY = "lm_loss"
VALID_KEY = "valid_loss"


def read_records(path: Path) -> list[dict[str, float]]:
    """Records in order of iteration; a last line that a killed run left unfinished is passed over."""
    by_iteration: dict[tuple[int, bool], dict[str, float]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "iteration" in record:
            by_iteration[record["iteration"], TRAIN_KEY in record] = record
    return [by_iteration[key] for key in sorted(by_iteration)]


def series(records: list[dict[str, float]], key: str) -> tuple[list[float], list[float]]:
    """(iterations, values) of the records that have `key`."""
    having = [record for record in records if record.get(key) is not None]
    return [record["iteration"] for record in having], [float(record[key]) for record in having]  # also of "NaN"


def labels_of(paths: list[Path]) -> dict[Path, str]:
    """The folder of each run, without what all of them begin with."""
    folders = {path: path.resolve().parent for path in paths}
    shared = Path(os.path.commonpath(folders.values()))
    shared = shared.parent if shared in folders.values() else shared
    return {path: str(folder.relative_to(shared)) for path, folder in folders.items()}


def draw(paths: list[Path], output: Path, log_scale: bool) -> str:
    """Writes the picture and returns a line that says what is in it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), constrained_layout=True)
    summary, labels = [], labels_of(paths)
    for path in paths:
        records = read_records(path)
        iterations, losses = series(records, TRAIN_KEY)
        if not losses:
            raise ValueError(f"{path} has no record with an iteration and {TRAIN_KEY}")
        label = labels[path]
        (line,) = axes.plot(iterations, losses, linewidth=1.2, label=f"{label}, training")
        at, values = series(records, VALID_KEY)
        if values:
            axes.plot(at, values, "o", markersize=4, color=line.get_color(), label=f"{label}, validation")
        summary.append(f"{path}: lm loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    axes.set_xlabel("iteration")
    axes.set_ylabel("lm loss (nats per token)")
    if log_scale:
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=120)
    pyplot.close(figure)
    return "\n".join(summary)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", type=Path, nargs="+", help="metrics.jsonl of each run")
    parser.add_argument("--output", type=Path, required=True, help="PNG file to write")
    parser.add_argument("--log-scale", action="store_true", help="logarithmic loss axis")
    args = parser.parse_args(argv)
    try:
        refuse_picture("--output", args.output, PICTURES)
        print(draw(args.metrics, args.output, args.log_scale))
    except ImportError:
        print("the loss curve needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"drawn: {args.output}")
    return 0


if __name__ == "__main__":
    run_tool(main)
