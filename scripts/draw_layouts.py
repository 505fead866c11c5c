"""Plot the losses of the runs that scripts/draw_layouts.sh trains. `python scripts/draw_layouts.py FOLDER` writes
FOLDER/layouts.png.

The upper plot overlays the losses of all runs. The lower plot shows the relative difference between the loss under each
layout and the loss of a single process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.pictures.drawing import new_figure, write_picture

ONE = "one process"


def losses_of(run: Path) -> list[float]:
    """Return the loss of each iteration in a log."""
    return [json.loads(line)["lm_loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def draw(folder: Path) -> str:
    """Write the picture. Returns a line with the largest difference."""
    runs = {path.parent.name: losses_of(path.parent) for path in sorted(folder.glob("*/metrics.jsonl"))}
    one = runs.pop(ONE)
    steps = range(1, len(one) + 1)
    figure = new_figure(8, 5)
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    above.plot(steps, one, color="#c9c9c4", linewidth=7, label=ONE)
    largest = 0.0
    for number, (name, losses) in enumerate(runs.items()):
        differences = [abs(loss - expected) / expected for loss, expected in zip(losses, one, strict=True)]
        largest = max(largest, *differences)
        above.plot(steps, losses, color=f"C{number}", linewidth=1, linestyle=(number, (1, len(runs) - 1)), label=name)
        below.plot(steps, [max(each, 1e-9) for each in differences], color=f"C{number}", linewidth=1)
    above.set_title(f"Training loss of one process and of {len(runs)} layouts, float32")
    above.set_ylabel("loss")
    for handle in above.legend(frameon=False, ncols=2).legend_handles[1:]:
        handle.set_linestyle("solid")
    below.set_title("Relative difference from one process (0 is drawn at 1e-9)")
    below.set_yscale("log")
    below.set_yticks([1e-9, 1e-7, 1e-5, 1e-3], ["1e-9", "1e-7", "1e-5", "1e-3"])
    below.minorticks_off()
    below.set_xlabel("iteration")
    write_picture(figure, folder / "layouts.png")
    return f"largest relative difference from one process: {largest:.1e}"


if __name__ == "__main__":
    print(draw(Path(sys.argv[1])))
