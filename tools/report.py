"""One HTML page about a run: loss, throughput, goodput, memory, layout, timeline, saves, faults, configuration.

    python tools/report.py runs/a
    python tools/report.py runs/a --against runs/b runs/c --output a.html

RUN is a --save folder, or its URL, for which --output is needed. The page
needs no network and no script, and shows what there is: of a run that crashed or still
runs, without a trace, or with damaged files. --against adds the curves of other runs and the values that differ. Code
that the run names is not executed; --extension names it for the plan of a run with parts of your own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

if not __package__:  # run as a file of a clone
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "tools"

from megatron.core.dist_checkpointing.file_storage import located
from megatron.core.fsync import whole_file
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve
from megatron.training.extensions import ExtensionError

from .common import add_extension_flag, refuse, refuse_unwritable, run_tool, too_small, tool_parser
from .pictures import report_sections as sections
from .pictures.fetched_run import local_run
from .pictures.plot_memory import read_plan
from .pictures.run_folder import CONFIG, RunFolder, read_run


def main(argv: Sequence[str] | None = None) -> int:
    parser = tool_parser(__doc__)
    add_extension_flag(parser, argv)
    add = parser.add_argument
    add("run", type=located, help="--save folder of the run, or its metrics.jsonl")
    add("--against", type=located, metavar="RUN", nargs="+", action="extend", default=[], help="runs to compare with")
    add("--output", type=Path, metavar="FILE.html", help="default: report.html in the folder of the run")
    add("--metrics-file", type=Path, help="default: metrics.jsonl in the folder of the run")
    add("--trace", type=Path, help="default: the newest in the folder trace of the run")
    add("--outcome", type=Path, help="status file of the run (OUTCOME_FILE); default: outcome there")
    add("--plan", type=Path, help="file of --dry-run --json; default: computed, if the layout is known")
    add("--no-plan", action="store_true", help="compute no plan of the memory")
    add("--gpus-per-node", type=int, default=8, help="for the map of ranks without a trace (default: 8)")
    args = parser.parse_args(argv)
    refuse(too_small(args, gpus_per_node=1))
    with ExitStack() as stack:
        run, *others = [stack.enter_context(local_run(path)) for path in (args.run, *args.against)]
        return _write(args, run, others)


def _write(args: argparse.Namespace, path: Path, against: Sequence[Path]) -> int:
    run = read_run(path, args.metrics_file, args.outcome, args.trace)
    others = [read_run(other) for other in against]
    plan, why = None, "--no-plan"
    if args.plan is not None:
        plan = read_plan(args.plan)
    elif not args.no_plan:
        plan, why = computed_plan(run)
    if args.output is None and not isinstance(args.run, Path):
        raise ValueError(f"--output is needed for {args.run}, whose folder is not on the local disk")
    output = args.output or run.path / "report.html"
    refuse_unwritable("--output", output)
    text = report(run, others, plan, why, args.gpus_per_node)
    output.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(output) as file:
        file.write_text(text, encoding="utf-8")
    print(f"report: {output}")
    return 0


def report(
    run: RunFolder, others: Sequence[RunFolder] = (), plan: Any = None, why_no_plan: str = "", gpus_per_node: int = 8
) -> str:
    """The page of a run."""
    last = next((record["time"] for record in reversed(run.records) if "time" in record), None)
    lead = sections.html.paragraph(
        f"{run.path.resolve()}" + (f"; last record {sections.when(last)} UTC" if last else ""), "soft"
    )
    if others:
        paths = ", ".join(str(other.path.resolve()) for other in others)
        lead += sections.html.paragraph(f"compared with {paths}", "soft")
    return sections.html.page(
        f"Run {run.name}",
        lead,
        {
            "Summary": sections.summary(run),
            "Loss": sections.loss(run, others),
            "Throughput": sections.throughput(run, others),
            "Goodput": sections.goodput(run),
            "Memory": sections.memory(run, plan, why_no_plan),
            "Layout": sections.layout(run, gpus_per_node),
            "Timeline": sections.timeline(run),
            "Saves": sections.saves(run),
            "Faults and restarts": sections.faults(run),
            "Configuration": sections.configuration(run, others),
        },
    )


def computed_plan(run: RunFolder) -> tuple[list[dict[str, int]] | None, str]:
    """(the plan of the run's memory by pipeline rank, or None; why there is none)"""
    path, world_size = run.path / CONFIG, run.world_size
    if not path.is_file() or world_size is None:
        return None, "the configuration or the number of ranks is not known"
    try:
        given = parse_args(["--config", str(path)])
        from megatron.extensions.plan.planner.memory import memory_of_ranks
        from megatron.training.plan import plan_of

        # The size that the run's tokenizer had stands in the file as derived: the tokenizer may be gone.
        vocab_size = run.config.get("vocab-size") if given.model.vocab_size is None else None
        config = plan_of(resolve(given, world_size, vocab_size)).longest.config
        return [rank.record for rank in memory_of_ranks(config, world_size)], ""
    except ExtensionError as error:
        return None, str(error)
    except SystemExit:
        return None, f"{CONFIG} is not accepted by this version"
    except Exception as error:  # a report must not fail for want of a plan
        return None, f"it could not be computed ({type(error).__name__}: {error})"


if __name__ == "__main__":
    run_tool(main)
