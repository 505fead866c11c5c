"""Predicted step times beside published ones, run by run.

    python tools/bench/published_runs.py
    python tools/bench/published_runs.py --only a100 --parts

Prints each run's published and predicted step time and the error, then the median and the 90th percentile of errors,
of runs that constants were fitted to and of those held out. The runs and their sources are in
tests/fixtures/published_runs.yaml.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.extensions.planner.device_file import read_device
from megatron.extensions.planner.flops import model_flops
from megatron.extensions.planner.time.step_time import PlannerCache, StepTime, predict_step
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve, validate
from tools.bench.side_by_side import write_figures

RUNS = Path(__file__).resolve().parents[2] / "tests/fixtures/published_runs.yaml"


@dataclass(frozen=True)
class PublishedRun:
    """One published run."""

    model: str
    source: str
    gpus: int
    length: int
    gbs: int
    mbs: int
    tp: int
    pp: int
    cp: int
    vp: int
    device: str
    flags: str
    """All of pretrain_gpt.py's flags."""

    fit: bool
    """Whether constants of the device file were fitted to it."""

    other: bool
    """Whether its hardware is another than the device file's: not counted."""

    published: Mapping[str, float]
    """step (seconds), tokens (tokens/s of a device), tflops, or memory (GiB)."""

    precision: str
    differs: str = ""
    """What the published program does otherwise and no flag asks for."""

    keeps_scores: int = 0
    """Bytes that the published program keeps for each score of attention."""

    @property
    def layout(self) -> str:
        sizes = {"TP": self.tp, "PP": self.pp, "VP": self.vp, "CP": self.cp}
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "DP"

    def config(self) -> RunConfig:
        """Resolved. Raises ValueError if it is not legal."""
        config = resolve(parse_args(self.flags.split()), self.gpus)
        if problems := validate(config, self.gpus):
            raise ValueError("\n".join(map(str, problems)))
        return config

    def seconds(self, config: RunConfig) -> float:
        """The published step time."""
        (kind, value), tokens = next(iter(self.published.items())), self.gbs * self.length
        if kind == "step":
            return value
        if kind == "tokens":
            return tokens / value / self.gpus
        return self._flops(config) / value / 1e12 / self.gpus

    def _flops(self, config: RunConfig) -> float:
        """FLOPs of a step by the count of the source."""
        model, tokens = config.model, self.gbs * self.length
        if not self.source.startswith("ptd"):
            return model_flops(model).total * tokens
        layers, hidden = model.num_layers, model.hidden_size  # arXiv 2104.04473, equation 3
        rest = 1 + self.length / (6 * hidden) + model.padded_vocab_size / (16 * layers * hidden)
        return 96 * tokens * layers * hidden**2 * rest


def published_runs(path: Path = RUNS) -> Iterator[PublishedRun]:
    """The runs of the file; its families and models are added to those of published_runs.yaml."""
    table, shared = yaml.safe_load(path.read_text()), yaml.safe_load(RUNS.read_text())
    families, models = ({**shared[kind], **table.get(kind, {})} for kind in ("families", "models"))
    for row in table["runs"]:
        model, source, _, length, gbs, mbs, tp, pp, cp, vp = row["is"]
        shape = models[model]
        layers, hidden, heads, groups, ffn = shape["shape"]
        recipe = row.get("fp8")
        flags = [
            table["common"],
            families[shape["family"]],
            shape.get("flags", ""),
            table["source_flags"][source],
            row.get("flags", ""),
            f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --ffn-hidden-size {ffn}",
            f"--group-query-attention --num-query-groups {groups}" if groups != heads else "",
            f"--seq-length {length} --global-batch-size {gbs} --micro-batch-size {mbs}",
            f"--tp {tp} --pp {pp} --cp {cp}",
            f"--num-virtual-stages-per-pipeline-rank {vp}" if vp > 1 else "",
            "--sequence-parallel" if tp > 1 and row.get("device") != "a100" else "",
            f"--fp8-format hybrid --fp8-recipe {recipe}" if recipe else "",
        ]
        published = {kind: float(row[kind]) for kind in ("step", "tokens", "tflops", "memory") if kind in row}
        assert len(published) == 1, row
        yield PublishedRun(
            *row["is"],
            row.get("device", "h100"),
            " ".join(" ".join(flags).split()),
            row.get("fit", False),
            row.get("other", False),
            published,
            "fp16"
            if "--fp16" in table["source_flags"][source]
            else "fp8"
            if recipe or "--fp8" in table["source_flags"][source]
            else "bf16",
            row.get("differs", ""),
            table.get("keeps_scores", {}).get(source, 0),
        )


@dataclass(frozen=True)
class Compared:
    """A run and its prediction."""

    run: PublishedRun
    published: float
    step: StepTime

    @property
    def error(self) -> float:
        """Relative error of the predicted step time."""
        return self.step.seconds / self.published - 1


def compare(runs: Sequence[PublishedRun], cache: PlannerCache | None = None) -> Iterator[Compared]:
    """Predicts each run on nodes of eight devices."""
    cache = cache or PlannerCache()
    for run in runs:
        config = run.config()
        step = predict_step(config, run.gpus, read_device(run.device), 8, cache)
        yield Compared(run, run.seconds(config), step)


def percentile(values: Sequence[float], share: float) -> float:
    """Interpolated between neighbours."""
    ordered, place = sorted(values), share * (len(values) - 1)
    low = int(place)
    return ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def summary(found: Sequence[Compared]) -> dict[str, dict[str, float]]:
    """Errors of fitted and of held-out runs."""
    sums = {}
    for title, group in (
        ("fitted", [each for each in found if each.run.fit and not each.run.other]),
        ("held out", [each for each in found if not each.run.fit and not each.run.other]),
    ):
        if errors := [abs(each.error) for each in group]:
            sums[title] = {
                "runs": len(errors),
                "median": statistics.median(errors),
                "90th percentile": percentile(errors, 0.9),
                "largest": max(errors),
            }
    return sums


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="runs whose device, source, model or precision has this in it")
    parser.add_argument("--parts", action="store_true", help="print what each predicted step is spent on")
    parser.add_argument("--json", type=Path, help="where to write the table")
    args = parser.parse_args(argv)
    runs = [
        run for run in published_runs() if args.only in " ".join((run.device, run.source, run.model, run.precision))
    ]
    if not runs:
        parser.error(f"--only {args.only}: no run has this in its device, source, model or precision; see {RUNS}")
    found = []
    print(f"{'model':<17}{'source':<14}{'':<6}{'':<6}{'GPUs':>6}{'tokens':>8}{'batch':>6}  {'layout':<22}"
          f"{'published':>10}{'predicted':>10}{'error':>8}  bound by")  # fmt: skip
    for each in compare(runs):
        found.append(each)
        run = each.run
        mark = " fitted" if run.fit else " other hardware" if run.other else ""
        print(
            f"{run.model:<17}{run.source:<14}{run.device:<6}{run.precision:<6}{run.gpus:>6}{run.length:>8}{run.gbs:>6}"
            f"  {run.layout:<22}{each.published:>8.2f} s{each.step.seconds:>8.2f} s{each.error:>+8.1%}  "
            f"{each.step.bound_by}{mark}",
            flush=True,
        )
        if args.parts:
            shares = sorted(each.step.parts.items(), key=lambda part: -part[1])
            print("    " + ", ".join(f"{name} {value / each.step.seconds:.1%}" for name, value in shares if value > 0))
    sums = summary(found)
    for title, figures in sums.items():
        shown = ", ".join(f"{name} {value:.1%}" for name, value in figures.items() if name != "runs")
        print(f"{title}, {figures['runs']} runs: {shown}")
    rows = [
        {**asdict(each.run), "published_s": each.published, "predicted_s": each.step.seconds, "error": each.error}
        for each in found
    ]
    write_figures(args.json, {"runs": rows, "errors": sums})
    return 0


if __name__ == "__main__":
    sys.exit(main())
