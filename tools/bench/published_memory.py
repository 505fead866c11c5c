"""Planned peaks of device memory beside published ones, run by run.

    python tools/bench/published_memory.py
    python tools/bench/published_memory.py --only zero-bubble --parts

Prints each run's published and planned peak of the rank that holds most, the scores of attention that the published
program keeps and this one does not, as derived, and the relative error without and with them; then the median and the
largest of the errors that count. Plans are those of `pretrain_gpt.py --dry-run`. The runs, their sources and what
the published programs do otherwise are in tests/fixtures/published_memory.yaml.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.core.parallel_dims import ParallelDims
from megatron.extensions.planner.dry_run.memory import RankMemory, memory_of_ranks
from tools.bench.published_runs import PublishedRun, published_runs

MEMORY = Path(__file__).resolve().parents[2] / "tests/fixtures/published_memory.yaml"
GIB = 1024**3


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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="runs whose source or model has this in it")
    parser.add_argument("--parts", action="store_true", help="print what each plan consists of")
    args = parser.parse_args(argv)
    runs = [run for run in published_runs(MEMORY) if args.only in f"{run.source} {run.model}"]
    if not runs:
        parser.error(f"--only {args.only}: no run has this in its source or model; see {MEMORY}")
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
        if args.parts:
            sizes = each.fullest.sizes.items()
            parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in sizes)
            print(f"    pipeline rank {each.fullest.plan.pp_rank}: {parts}")
        if not run.other:
            counted.append(each)
    for title, errors in (
        ("planned", [abs(each.error) for each in counted]),
        ("with scores", [abs(each.error_with_scores) for each in counted]),
    ):
        if errors:
            print(f"{title}, {len(errors)} runs: median {statistics.median(errors):.1%}, largest {max(errors):.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
