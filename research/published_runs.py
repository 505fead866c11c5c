"""Compare predicted step times, or planned peak device memory, with the published values of each run.

    python research/published_runs.py
    python research/published_runs.py --only a100 --parts
    python research/published_runs.py --memory --only zero-bubble --parts

The tool prints each run's published and predicted step time and the error. It then prints the median and the 90th
percentile of the errors, separately for runs to which constants were fitted and for held-out runs. The runs and their
sources are in research/published_runs.yaml.

With --memory, the tool prints the published and the planned peak memory of each run, on the rank that uses the most
memory. Some published programs store the attention scores, which this program does not. For such programs, the tool
prints the computed size of the scores, and the relative error with and without the scores. Then it prints the median
and the maximum of the errors. Runs on other hardware are excluded from these statistics. The plans are computed in the
same way as by `pretrain_gpt.py --dry-run`. The runs, their sources and the differences of the published programs are in
research/published_memory.yaml.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import yaml

if __package__ in (None, ""):
    # Remove this folder from the path, because its module names clash with those of other packages.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from megatron.extensions.plan.planner.device_file import read_device
from megatron.extensions.plan.planner.fake_stage import PlannerCache
from megatron.extensions.plan.planner.flops import model_flops
from megatron.extensions.plan.planner.memory import fullest, memory_of_ranks
from megatron.extensions.plan.planner.time.step_time import predict_step
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve_legal
from research.published_programs import THIS, Program, ProgramCache
from tools.bench.side_by_side import bench_parser, write_json

HERE = Path(__file__).parent
RUNS, MEMORY = HERE / "published_runs.yaml", HERE / "published_memory.yaml"
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
    precision: str
    flags: str
    """Flags of pretrain_gpt.py that reproduce the run."""

    published: Mapping[str, float]
    """Published figure of the run, keyed by its kind: "step" (seconds), "tokens" (tokens/s per device), "tflops", or
    "memory" (GiB)."""

    fit: bool
    """True if constants of the device file were fitted to this run."""

    other: bool
    """True if the hardware of the run differs from the hardware that the device file describes. Such a run is excluded
    from the statistics."""

    differs: str
    """Description of differences from the published program that cannot be expressed with flags of this program."""

    keeps_scores: int
    """Bytes that the published program keeps per attention score."""

    program: Program = THIS
    """Differences in computation between the published program and this program."""

    HEAD: ClassVar[str] = f"{'model':<17}{'source':<14}{'':<12}{'GPUs':>6}{'tokens':>8}{'batch':>11}  {'layout':<22}"

    def __str__(self) -> str:
        sizes = {"TP": self.tp, "PP": self.pp, "VP": self.vp, "CP": self.cp}
        layout = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "DP"
        what = f"{self.model:<17}{self.source:<14}{self.device:<6}{self.precision:<6}"
        return f"{what}{self.gpus:>6}{self.length:>8}{f'{self.gbs} by {self.mbs}':>11}  {layout:<22}"

    def config(self) -> RunConfig:
        """Return the resolved configuration. Raises ValueError if the configuration is not valid."""
        return resolve_legal(parse_args(self.flags.split()), self.gpus)

    def seconds(self, config: RunConfig) -> float:
        """Return the published step time."""
        (kind, value), tokens = next(iter(self.published.items())), self.gbs * self.length
        if kind == "step":
            return value
        if kind == "tokens":
            return tokens / value / self.gpus
        return self._flops(config) / value / 1e12 / self.gpus

    def _flops(self, config: RunConfig) -> float:
        """Return the FLOPs of a training step, counted as in the publication."""
        model, tokens = config.model, self.gbs * self.length
        if not self.source.startswith("ptd"):
            return model_flops(model).total * tokens
        layers, hidden = model.num_layers, model.hidden_size  # equation 3 of arXiv 2104.04473
        rest = 1 + self.length / (6 * hidden) + model.padded_vocab_size / (16 * layers * hidden)
        return 96 * tokens * layers * hidden**2 * rest


def published_runs(path: Path = RUNS) -> Iterator[PublishedRun]:
    """Yield the runs that a YAML file describes. A run can refer to model families and models that are defined in the
    same file or in published_runs.yaml."""
    table, shared = yaml.safe_load(path.read_text()), yaml.safe_load(RUNS.read_text())
    families, models = ({**shared[kind], **table.get(kind, {})} for kind in ("families", "models"))
    for row in table["runs"]:
        model, source, _, length, gbs, mbs, tp, pp, cp, vp = row["is"]
        shape = models[model]
        of_source = table["source_flags"][source]
        device = row.get("device", "h100")
        layers, hidden, heads, groups, ffn = shape["shape"]
        flags = [
            table["common"],
            families[shape["family"]],
            shape.get("flags", ""),
            of_source,
            row.get("flags", ""),
            f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --ffn-hidden-size {ffn}",
            f"--group-query-attention --num-query-groups {groups}" if groups != heads else "",
            f"--seq-length {length} --global-batch-size {gbs} --micro-batch-size {mbs}",
            f"--tp {tp} --pp {pp} --cp {cp}",
            f"--num-virtual-stages-per-pipeline-rank {vp}" if vp > 1 else "",
            "--sequence-parallel" if tp > 1 and device != "a100" else "",
            f"--fp8-format hybrid --fp8-recipe {row['fp8']}" if "fp8" in row else "",
        ]
        in_fp8 = "fp8" in row or "--fp8" in of_source
        precision = "fp16" if "--fp16" in of_source else "fp8" if in_fp8 else "bf16"
        published = {kind: float(row[kind]) for kind in ("step", "tokens", "tflops", "memory") if kind in row}
        assert len(published) == 1, row
        told = row.get("fit", False), row.get("other", False), row.get("differs", "")
        scores = table.get("keeps_scores", {}).get(source, 0)
        program = Program(**dict.fromkeys(table.get("programs", {}).get(source, ()), True))
        yield PublishedRun(*row["is"], device, precision, " ".join(flags), published, *told, scores, program)


@dataclass(frozen=True)
class Compared:
    """Published and predicted figure of a run: the step time in seconds, or the peak memory in GiB of the rank that
    uses the most memory."""

    run: PublishedRun
    published: float
    found: float
    about: str
    parts: str
    scores: float | None = None
    """Size in GiB of the attention scores that the published program stores. The plan does not include the scores."""

    @property
    def error(self) -> float:
        """Relative error of the predicted figure."""
        return self.found / self.published - 1

    @property
    def error_with_scores(self) -> float:
        return (self.found + (self.scores or 0.0)) / self.published - 1

    def __str__(self) -> str:
        unit = " s" if self.scores is None else " GiB"
        text = f"{self.run}{self.published:>9.2f}{unit:<4}{self.found:>9.2f}{unit:<4}{self.error:>+8.1%}"
        more = "" if self.scores is None else f"{self.scores:>9.2f}{unit}{self.error_with_scores:>+8.1%}"
        return f"{text}{more}  {self.about}".rstrip()


def compare(runs: Sequence[PublishedRun], cache: PlannerCache | None = None) -> Iterator[Compared]:
    """For each run, yield a comparison of the predicted and the published step time. The prediction assumes nodes with
    eight devices."""
    cache = cache or PlannerCache()
    caches: dict[Program, PlannerCache] = {THIS: cache}
    for run in runs:
        config = run.config()
        own = caches.setdefault(run.program, ProgramCache(cache.kinds, cache.known, run.program))
        step = predict_step(config, run.gpus, read_device(run.device), 8, own)
        shares = sorted(step.parts.items(), key=lambda part: -part[1])
        parts = ", ".join(f"{name} {value / step.seconds:.1%}" for name, value in shares if value > 0)
        mark = " fitted" if run.fit else " other hardware" if run.other else ""
        yield Compared(run, run.seconds(config), step.seconds, f"{step.bound_by}{mark}", parts)


def plan_peaks(runs: Sequence[PublishedRun]) -> Iterator[Compared]:
    """For each run, compare the published peak memory with the planned memory of the rank that uses the most memory.
    Raises ValueError if a run's flags are not valid."""
    for run in runs:
        config = run.config()
        held = fullest(memory_of_ranks(config, run.gpus))
        pairs = zip(held.plan.stages, held.activations.in_flight, strict=True)
        layers = sum(len(stage.layers) * microbatches for stage, microbatches in pairs)
        heads = config.model.num_attention_heads // run.tp
        scores = run.keeps_scores * layers * run.mbs * heads * run.length**2 / run.cp / GIB
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in held.sizes.items())
        about = f"{'not counted: ' if run.other else ''}{run.differs}"
        parts = f"pipeline rank {held.plan.pp_rank}: {parts}"
        yield Compared(run, run.published["memory"], held.total / GIB, about, parts, scores)


def summary(errors: Sequence[float]) -> dict[str, float]:
    found = np.abs(errors)
    figures = {"median": np.median(found), "90th percentile": np.percentile(found, 90), "largest": np.max(found)}
    return {"runs": len(errors)} | {name: float(value) for name, value in figures.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--only", default="", help="runs whose device, source, model or precision contains this text")
    parser.add_argument("--parts", action="store_true", help="print the components of each step or plan")
    parser.add_argument("--memory", action="store_true", help="peaks of device memory")
    args = parser.parse_args(argv)
    table = MEMORY if args.memory else RUNS
    runs = [
        run for run in published_runs(table) if args.only in f"{run.device} {run.source} {run.model} {run.precision}"
    ]
    if not runs:
        parser.error(f"--only {args.only}: no run has this text in its device, source, model or precision; see {table}")
    columns = f"{'published':>13}{'planned' if args.memory else 'predicted':>13}{'error':>8}"
    more = f"{'+ scores':>13}{'error':>8}" if args.memory else "  bound by"
    print(f"{PublishedRun.HEAD}{columns}{more}")
    found = []
    for each in plan_peaks(runs) if args.memory else compare(runs):
        found.append(each)
        print(each, flush=True)
        if args.parts:
            print(f"    {each.parts}")
    counted = [each for each in found if not each.run.other]
    errors = {
        "fitted": [each.error for each in counted if each.run.fit],
        "planned" if args.memory else "held out": [each.error for each in counted if not each.run.fit],
        "with scores": [each.error_with_scores for each in counted if args.memory],
    }
    sums = {title: summary(group) for title, group in errors.items() if group}
    for title, figures in sums.items():
        shown = ", ".join(f"{name} {value:.1%}" for name, value in figures.items() if name != "runs")
        print(f"{title}, {figures['runs']} runs: {shown}")
    write_json(args.json, {"errors": sums}, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
