"""Predicted step times, or planned peaks of device memory, beside published ones, run by run.

    python tools/bench/published_runs.py
    python tools/bench/published_runs.py --only a100 --parts
    python tools/bench/published_runs.py --memory --only zero-bubble --parts

Prints each run's published and predicted step time and the error, then the median and the 90th percentile of errors,
of runs that constants were fitted to and of those held out. The runs and their sources are in
tests/fixtures/published_runs.yaml.

With --memory, prints each run's published and planned peak of the rank that holds most, the scores of attention that
the published program keeps and this one does not, as derived, and the relative error without and with them; then the
median and the largest of the errors that count. Plans are those of `pretrain_gpt.py --dry-run`. The runs, their
sources and what the published programs do otherwise are in tests/fixtures/published_memory.yaml.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.core.parallel_dims import ParallelDims
from megatron.extensions.planner.device_file import read_device
from megatron.extensions.planner.dry_run.memory import RankMemory, memory_of_ranks
from megatron.extensions.planner.flops import model_flops
from megatron.extensions.planner.time.step_time import PlannerCache, StepTime, predict_step
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve, validate
from tools.bench.side_by_side import bench_parser, write_figures

FIXTURES = Path(__file__).resolve().parents[2] / "tests/fixtures"
RUNS, MEMORY = FIXTURES / "published_runs.yaml", FIXTURES / "published_memory.yaml"
GIB = 1024**3


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


@dataclass(frozen=True)
class PlannedPeak:
    """A run and the plan of the rank that holds most."""

    run: PublishedRun
    fullest: RankMemory

    @property
    def planned(self) -> float:
        """GiB."""
        return self.fullest.total / GIB

    @property
    def scores(self) -> float:
        """GiB of scores that the published program keeps beside what is planned."""
        run, held = self.run, self.fullest
        pairs = zip(held.plan.stages, held.activations.in_flight, strict=True)
        layers = sum(len(stage.layers) * microbatches for stage, microbatches in pairs)
        heads = run.config().model.num_attention_heads // run.tp
        return run.keeps_scores * layers * run.mbs * heads * run.length**2 / run.cp / GIB

    @property
    def published(self) -> float:
        """GiB."""
        return self.run.published["memory"]

    @property
    def error(self) -> float:
        """Relative error of the planned peak."""
        return self.planned / self.published - 1

    @property
    def error_with_scores(self) -> float:
        return (self.planned + self.scores) / self.published - 1


def plan_peaks(runs: Sequence[PublishedRun]) -> Iterator[PlannedPeak]:
    """Raises ValueError if a run's flags are not legal."""
    for run in runs:
        config = run.config()
        ranks = memory_of_ranks(config, ParallelDims.from_config(config.parallel, run.gpus))
        yield PlannedPeak(run, max(ranks, key=lambda rank: rank.total))


def say_memory(runs: Sequence[PublishedRun], parts: bool) -> None:
    """Prints the table of planned peaks."""
    print(f"{'model':<13}{'source':<13}{'':<6}{'GPUs':>5}{'tokens':>8}{'batch':>6}  {'layout':<12}"
          f"{'published':>11}{'planned':>11}{'error':>8}{'+ scores':>12}{'error':>8}")  # fmt: skip
    counted: list[PlannedPeak] = []
    for each in plan_peaks(runs):
        run = each.run
        print(
            f"{run.model:<13}{run.source:<13}{run.precision:<6}{run.gpus:>5}{run.length:>8}{run.mbs:>6}  "
            f"{run.layout:<12}{each.published:>7.2f} GiB{each.planned:>7.2f} GiB{each.error:>+8.1%}"
            f"{each.scores:>8.2f} GiB{each.error_with_scores:>+8.1%}"
            f"{'  not counted: ' if run.other else '  ' if run.differs else ''}{run.differs}",
            flush=True,
        )
        if parts:
            sizes = each.fullest.sizes.items()
            shown = ", ".join(f"{name} {size / GIB:.2f}" for name, size in sizes)
            print(f"    pipeline rank {each.fullest.plan.pp_rank}: {shown}")
        if not run.other:
            counted.append(each)
    for title, errors in (
        ("planned", [abs(each.error) for each in counted]),
        ("with scores", [abs(each.error_with_scores) for each in counted]),
    ):
        if errors:
            print(f"{title}, {len(errors)} runs: median {statistics.median(errors):.1%}, largest {max(errors):.1%}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--only", default="", help="runs whose device, source, model or precision has this in it")
    parser.add_argument(
        "--parts", action="store_true", help="print what each step is spent on, or each plan consists of"
    )
    parser.add_argument("--memory", action="store_true", help="peaks of device memory")
    args = parser.parse_args(argv)
    table, words = (MEMORY, "source model") if args.memory else (RUNS, "device source model precision")
    runs = [run for run in published_runs(table) if args.only in " ".join(getattr(run, word) for word in words.split())]
    if not runs:
        parser.error(f"--only {args.only}: no run has this in its {words.replace(' ', ', ')}; see {table}")
    if args.memory:
        say_memory(runs, args.parts)
        return 0
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
