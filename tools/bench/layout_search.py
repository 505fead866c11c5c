"""How long a search for layouts takes, and where the published layout of a run stands among what it finds.

    python tools/bench/layout_search.py
    python tools/bench/layout_search.py --only llama3.1-405b --device-memory 76

Of runs of tests/fixtures/published_runs.yaml, and of GPT-3 175B on 1,024 GPUs with the layout of arXiv 2104.04473. Wall
and processor time are those of the search alone, in this process and those that it starts; the given layout is the
published one, and its time that of `--dry-run --device`.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.extensions.planner.device_file import read_device
from megatron.extensions.planner.dry_run.memory import GIB, fullest
from megatron.extensions.planner.suggest.costs import LayoutCosts
from megatron.extensions.planner.suggest.report import MOST_PREDICTED, MOST_TIMED, SUGGESTED, layout_text
from megatron.extensions.planner.suggest.search import LayoutSearch
from megatron.extensions.planner.suggest.space import SearchedRun
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve
from tools.bench.published_runs import published_runs
from tools.bench.side_by_side import bench_parser, machine, say_machine, write_json

GPT_3 = (
    "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 "
    "--vocab-size 51200 --bf16 --mock-data --lr 1e-4 --train-iters 100 --micro-batch-size 1 --global-batch-size 1536 "
    "--attention-dropout 0 --hidden-dropout 0 --tp 8 --sequence-parallel --pp 16 "
    "--num-virtual-stages-per-pipeline-rank 3"
)
DEFAULT = (
    "llama3.1-8b dgxc",
    "gpt3-175b nemo",
    "nemotron4-340b nemo",
    "llama3.1-405b bridge-25.09",
    "qwen3-30b-a3b bridge",
)
"""The published runs that are searched by default: the first of each."""


@dataclass(frozen=True)
class Case:
    """A model, its published layout, and devices."""

    name: str
    gpus: int
    flags: str
    device: str = "h100"


@dataclass(frozen=True)
class Row:
    """A search."""

    name: str
    gpus: int
    wall_seconds: float
    processor_seconds: float
    layouts: int
    predicted: int
    measured: int
    best: str
    best_seconds: float
    given_seconds: float
    given_fits: bool
    given_place: int
    """1 where no suggestion is faster."""


def cases(only: str) -> Iterator[Case]:
    """GPT-3 175B and published runs, those with `only` in their name or the default ones."""
    if only in "gpt3-175b ptd":
        yield Case("gpt3-175b ptd", 1024, GPT_3)
    for wanted in [only] if only else DEFAULT:
        found = (run for run in published_runs() if wanted in f"{run.model} {run.source}" and not run.other)
        if run := next(found, None):
            yield Case(f"{run.model} {run.source}", run.gpus, run.flags, run.device)


def processor_seconds() -> float:
    """Of this process and the children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def searched(case: Case, device_memory: float | None, most: tuple[int | None, int | None]) -> Row:
    """Raises ValueError where no layout fits."""
    device = read_device(case.device)
    config = resolve(parse_args(case.flags.split()), case.gpus)
    limit = int((device_memory or device.memory_gib) * GIB)
    began, used = time.perf_counter(), processor_seconds()
    costs = LayoutCosts(SearchedRun(config, case.gpus), device, 8)
    search = LayoutSearch(costs, limit, *most)
    found = search.best(SUGGESTED)
    wall, used = time.perf_counter() - began, processor_seconds() - used
    if not found:
        raise ValueError(f"{case.name}: no layout fits {limit / GIB:.1f} GiB")
    given, memory, effort = costs.step(config), costs.memory(config), search.effort
    return Row(
        case.name,
        case.gpus,
        wall,
        used,
        effort.layouts,
        effort.predicted,
        effort.measured,
        layout_text(found[0].layout),
        found[0].step.seconds,
        given.seconds,
        fullest(memory).total <= limit,
        1 + sum(each.step.seconds < given.seconds for each in found),
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--only", default="", help="runs whose model and source have this in them: the first of them")
    parser.add_argument("--device-memory", type=float, help="GiB (default: what the device file says)")
    parser.add_argument("--all", action="store_true", help="search until nothing can be faster")
    args = parser.parse_args(argv)
    facts: dict[str, Any] = machine("torch")
    say_machine(facts)
    rows = []
    for case in cases(args.only):
        row = searched(case, args.device_memory, (None, None) if args.all else (MOST_PREDICTED, MOST_TIMED))
        rows.append(row)
        fits = "" if row.given_fits else ", does not fit"
        place = f"place {row.given_place}" if row.given_place <= SUGGESTED else f"slower than {SUGGESTED}"
        print(
            f"{row.name}, {row.gpus} GPUs: wall {row.wall_seconds:.1f} s, processor {row.processor_seconds:.1f} s, "
            f"{row.layouts:,} layouts, {row.predicted} predicted, {row.measured} measured\n"
            f"    best {row.best_seconds:.4g} s ({row.best})\n"
            f"    published layout {row.given_seconds:.4g} s, {row.given_seconds / row.best_seconds:.2f} of the best, "
            f"{place}{fits}",
            flush=True,
        )
    if not rows:
        parser.error(f"--only {args.only}: no run has this in its model and source")
    write_json(args.json, facts, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
